"""What the scripts do: one module a command, each a function from typed arguments to an `Outcome`.

A command reads its arguments, calls the engine and shapes the result. Parsing flags, printing and exit codes
are `dflash.cli`'s part; decoding, loading and looking up are the engine's.
"""
