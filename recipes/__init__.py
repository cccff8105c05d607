"""Runs that work as they stand: a module each, with `config()`, and `prepare(config)` for what comes first.

`python recipes/NAME.py [flags]` and `ppo-lightning fit --recipe NAME [flags]` are the same run. A recipe
imports nothing heavy at its top, so that `--help` answers at once. Modules with a leading underscore are
parts of recipes.
"""
