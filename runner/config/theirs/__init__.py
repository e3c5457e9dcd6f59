"""Settings of Accelerate and of transformers' Trainer, as keys of a run file. Pure.

`found` is what such a file gives: values with reasons, and what has no equal; `accelerate` reads
the YAML that `accelerate config` writes; `trainer` reads TrainingArguments as JSON.
"""
