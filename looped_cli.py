"""
The command `looped`. A module of its own beside the package: importing anything under `modeling_looped` registers
the models and thereby imports torch, and `looped --help` should not wait for that. Commands import what they need.
"""
