"""NexRL: reinforcement learning for language models, as thin glue between engines.

`import nexrl` stays light (no torch, no transformers): the names below are what a recipe needs.
"""

from nexrl.errors import ConfigError, NexRLError
from nexrl.types import Completion, PolicyVersion, Sampling, TokenRow, Trajectory, VersionSpan

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "ConfigError",
    "NexRLError",
    "PolicyVersion",
    "Sampling",
    "TokenRow",
    "Trajectory",
    "VersionSpan",
    "__version__",
]
