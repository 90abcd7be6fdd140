"""How small the zoo's models are: sizes by the names of settings, and by the types of models where no name tells."""

from __future__ import annotations

from typing import Any

VOCABULARY, WIDTH, HEADS, LAYERS, EXPERTS, POSITIONS = 96, 32, 4, 2, 4, 64
IMAGE_SIZE = 32

SIZES: dict[str, int] = {}


def _names(value: int, names: str) -> None:
    SIZES.update(dict.fromkeys(names.split(), value))


_names(VOCABULARY, "vocab_size vocab_size_per_layer_input decoder_vocab_size")
_names(
    WIDTH,
    """hidden_size d_model n_embd dim emb_dim embed_dim hidden_dim embedding_size embedding_dim intermediate_size
    moe_intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff d_inner dim_ff ffn_hidden_size n_inner
    feed_forward_size shared_expert_intermediate_size shared_intermediate_size dense_intermediate_size
    intermediate_size_mlp expert_ffn_hidden_size moe_shared_expert_intermediate_size pooler_hidden_size
    pooler_output_size projection_dim projection_size attention_hidden_size hidden_size_global output_dim
    out_hidden_size word_embed_proj_dim input_embedding_size output_embedding_size lru_width prediction_head_size
    decoder_hidden_size hidden_size_per_layer_input entity_emb_size cross_attention_hidden_size
    pronunciation_embed_dim shape_embed_dim router_hidden_size vision_output_dim d_latents""",
)
_names(
    HEADS,
    """num_attention_heads num_key_value_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
    attention_heads num_encoder_attention_heads num_decoder_attention_heads linear_num_heads linear_num_key_heads
    linear_num_value_heads index_n_heads swa_num_key_value_heads swa_num_attention_heads num_query_groups
    num_self_attention_heads num_cross_attention_heads mamba_n_heads mamba_num_heads n_mamba_heads
    num_global_key_value_heads""",
)
_names(
    WIDTH // HEADS,
    """head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim d_kv d_head dim_head index_head_dim linear_key_head_dim
    linear_value_head_dim linear_head_dim rotary_dim kv_channels attention_head_dim global_head_dim swa_head_dim
    attention_head_size q_lora_rank kv_lora_rank mamba_d_state state_size
    ssm_state_size time_step_rank mamba_dt_rank swa_v_head_dim query_pre_attn_scalar""",
)
_names(2 * WIDTH // HEADS, "qk_head_dim mamba_head_dim mamba_d_head mamba_headdim")
_names(
    LAYERS,
    """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers
    num_encoder_layers depth max_window_layers num_experts_per_tok num_experts_per_token moe_topk moe_k
    num_self_attends_per_block num_blocks top_k_experts""",
)
_names(
    EXPERTS,
    """num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num ffn_num_experts
    num_routed_experts""",
)
_names(
    1,
    """n_group topk_group num_expert_group n_groups mamba_n_groups mamba_ngroups first_k_dense_replace
    num_dense_layers num_kv_shared_layers moe_num_shared_experts n_shared_experts num_shared_experts""",
)
_names(
    POSITIONS,
    """max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions model_max_length
    context_length original_max_position_embeddings""",
)
_names(16, "sliding_window chunk_size mamba_chunk_size local_attention attention_chunk_size index_topk block_size")
_names(IMAGE_SIZE, "image_size input_size crop_size")
_names(8, "patch_size relative_attention_num_buckets num_buckets")
_names(0, "pad_token_id")
_names(1, "bos_token_id cls_token_id decoder_start_token_id")
_names(2, "eos_token_id sep_token_id forced_eos_token_id")

SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
REQUIRED = {
    "head_dim",
    "num_key_value_heads",
    "pad_token_id",
    "vocab_size",
    "n_routed_experts",
    "num_experts_per_tok",
}
LISTS: dict[str, tuple[int, ...]] = {
    "hidden_sizes": (16, 16, 32, 32),
    "embed_dims": (16, 16, 32, 32),
    "depths": (1, 1, 1, 1),
    "num_heads": (1, 2, 2, 4),
    "num_attention_heads": (1, 2, 2, 4),
}

# What no name tells.
_QWEN4: dict[str, Any] = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 8,
    "ple_embed_dim": 32,
    "ngram_vocab_size_base": 50,
    "heads_per_ngram": 2,
    "split_ngram_parts": 2,
}
_VISION: dict[str, dict[str, Any]] = {
    "bit": {"num_groups": 4, "embedding_size": 16},
    "cvt": {"embed_dim": [16, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
    "donut-swin": {"embed_dim": 8, "window_size": 2, "patch_size": 2},
    "efficientnet": {
        "width_coefficient": 1.0,
        "depth_coefficient": 1.0,
        "hidden_dim": 1280,
        "kernel_sizes": [3, 3, 5],
        "in_channels": [32, 16, 24],
        "out_channels": [16, 24, 24],
        "strides": [1, 1, 2],
        "num_block_repeats": [1, 1, 1],
        "expand_ratios": [1, 2, 2],
        "depthwise_padding": [],
    },
    "focalnet": {"embed_dim": 8, "patch_size": 4, "focal_levels": [1, 1, 1, 1], "hidden_sizes": [8, 16, 32, 64]},
    "hgnet_v2": {
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 16, 16, 32],
        "stage_mid_channels": [8, 8, 16, 16],
        "stage_out_channels": [16, 16, 32, 32],
        "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [2, 2, 2, 2],
        "hidden_sizes": [16, 16, 32, 32],
    },
    "hiera": {"embed_dim": 8, "image_size": [64, 64]},
    "levit": {
        "hidden_sizes": [16, 24, 32],
        "num_attention_heads": [2, 2, 2],
        "key_dim": [8, 8, 8],
        "patch_size": 16,
        "image_size": 64,
    },
    "mobilenet_v1": {"depth_multiplier": 0.1},
    "mobilenet_v2": {"depth_multiplier": 0.1},
    "mobilevit": {"hidden_sizes": [8, 16, 16], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32]},
    "mobilevitv2": {
        "base_attn_unit_dims": [16, 16, 16],
        "n_attn_blocks": [1, 1, 1],
        "width_multiplier": 0.25,
        "image_size": 64,
    },
    "pp_lcnet": {
        "stem_channels": 8,
        "class_expand": 16,
        "block_configs": [
            [[3, 8, 16, 1, False]],
            *[[[3, 16, 16, 2, False]]] * 2,
            [[5, 16, 16, 2, True]],
            [[5, 16, 32, 2, True]],
        ],
    },
    "swin": {"embed_dim": 8, "window_size": 2, "patch_size": 2},
    "swinv2": {"embed_dim": 8, "window_size": 2, "patch_size": 4},
    "textnet": {
        "stem_out_channels": 8,
        "hidden_sizes": [8, 8, 16, 16, 32],
        "conv_layer_kernel_sizes": [[[3, 3]], [[3, 3]], [[3, 1]], [[1, 3]]],
        "conv_layer_strides": [[1], [2], [1], [2]],
    },
}
OVERRIDES: dict[str, dict[str, Any]] = {
    **_VISION,
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [2, 3],
        "patch_size": 4,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
    },
    "bros": {"hidden_size": 64},
    "canine": {"num_hash_buckets": 64},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    },
    "ctrl": {"dff": WIDTH},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": HEADS, "clip_qkv": 8.0}},
    # As in all checkpoints.
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": POSITIONS},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 8,
        "share_att_key": True,
    },
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 2 * WIDTH, "mamba_d_head": 2 * WIDTH // HEADS},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "intermediate_size": [WIDTH] * 4,
        "altup_num_inputs": 2,
    },
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
            "num_hidden_layers": 2,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "got_ocr2": {
        "vision_config": {"output_channels": 16, "mlp_dim": 16, "num_hidden_layers": 1, "global_attn_indexes": [0]}
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "max_2d_position_embeddings": 64, "visual_embed": False},
    "lilt": {"hidden_size": 48},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "longformer": {"attention_window": 8},
    "luke": {"entity_vocab_size": 20},
    "markuplm": {"max_depth": 4, "xpath_unit_hidden_size": 4},
    "mbart": {"pad_token_id": 3},
    "mimo_v2_flash": {"head_dim": 16, "num_key_value_heads": 2},
    "mistral4": {"head_dim": 16},
    "mobilebert": {"true_hidden_size": 16, "intra_bottleneck_size": 16, "embedding_size": 16},
    "mpnet": {"relative_attention_num_buckets": 32},
    "neomme": {"head_dim": 16},
    "perceiver": {"num_latents": 8, "qk_channels": 32, "v_channels": 32, "num_blocks": 1},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 2,
    },
    "siglip2": {"vision_config": {"num_patches": 16}},
    "t5": {"decoder_start_token_id": 0},
    "roc_bert": {"pronunciation_vocab_size": 96, "shape_vocab_size": 96},
    "xlstm": {"use_cache": False, "num_heads": 4, "qk_dim_factor": 1.0, "hidden_size": 64, "embedding_dim": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16},
}
# For one class, where others have the same configuration.
CLASS_OVERRIDES: dict[str, dict[str, Any]] = {"ReformerModelWithLMHead": {"is_decoder": True}}
