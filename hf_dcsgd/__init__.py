"""Differentially private fine-tuning with the Hugging Face Trainer, without tuning a clipping threshold."""
