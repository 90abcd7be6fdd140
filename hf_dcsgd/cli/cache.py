"""`hf-dcsgd cache`: trunk caches on disk."""

import argparse
import json
import time

from hf_dcsgd.cli.shared import Subparsers, add_json_argument, add_subcommand


def add_parser(subparsers: Subparsers) -> None:
    parser = add_subcommand(
        subparsers,
        "cache",
        run,
        help="list or remove trunk caches, which hold private data",
        description="Trunk caches hold the training rows and what a frozen model makes of them: private data.\n"
        "`ls` shows them, `rm` removes them.",
        epilog="examples:\n  hf-dcsgd cache ls\n  hf-dcsgd cache rm 3f2a       # keys may be shortened\n"
        "  hf-dcsgd cache rm --all",
    )
    parser.add_argument("action", choices=("ls", "rm"), help="ls: list; rm: remove")
    parser.add_argument("keys", nargs="*", metavar="KEY", help="rm: the keys (or their first characters) to remove")
    parser.add_argument("--all", action="store_true", help="rm: remove all of them")
    parser.add_argument("--cache-dir", metavar="DIR", help="where they are (default: as trunk_cache_dir)")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    import shutil

    from hf_dcsgd.trunk.build import default_cache_dir, stored_caches
    from hf_dcsgd.validation import require

    caches = stored_caches(arguments.cache_dir)
    if arguments.action == "ls":
        if arguments.json:
            print(json.dumps(caches, indent=2))
            return 0
        for cache in caches:
            made = time.strftime("%Y-%m-%d %H:%M", time.localtime(cache["modified"]))
            size = f"{cache['bytes'] / 1e6:,.1f} MB"
            print(f"{cache['key']}  {size:>14}  {cache['rows']:>10,} rows  {made}  {cache['model']}")
        print(f"{len(caches)} trunk caches in {arguments.cache_dir or default_cache_dir()}")
        return 0
    require(bool(arguments.keys) != arguments.all, f"expected KEYs or --all, got {arguments.keys} and {arguments.all}")
    chosen = []
    for key in arguments.keys:
        matching = [cache for cache in caches if cache["key"].startswith(key)]
        require(len(matching) == 1, f"expected one cache whose key starts with {key!r}, found {len(matching)}")
        chosen += matching
    for cache in caches if arguments.all else chosen:
        shutil.rmtree(cache["path"])
        print(f"removed {cache['path']}")
    return 0
