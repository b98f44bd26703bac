"""The nouns that cross module borders: frozen dataclasses over numpy, no torch.

Words are those of docs/design.md. Read this file first: a data item is drawn, a rollout turns it
into a `Trajectory` of `TokenRow`s, rollouts of one draw form a `RolloutGroup`, groups a `Batch`,
a batch becomes `RowChunk`s for the train service, and ends in one published `WeightManifest`.
"""

from nexrl.types.completion import Completion
from nexrl.types.ledger import LedgerSnapshot
from nexrl.types.rollouts import Batch, Draw, RolloutGroup, RolloutRecord
from nexrl.types.sampling import Prompt, Sampling
from nexrl.types.training import (
    CANDIDATE_IDS,
    OUTPUT_MASK,
    BackwardOutput,
    ForwardOutput,
    LossSpec,
    ModelSpec,
    OptimParams,
    OptimResult,
    RowChunk,
    TrainInfo,
)
from nexrl.types.trajectory import (
    EMPTY_PROVENANCE,
    Alignment,
    Annotation,
    Column,
    Failure,
    MediaSpan,
    Provenance,
    Segment,
    TokenRow,
    Trajectory,
    TrajectoryStatus,
    TruncationCause,
    Turn,
)
from nexrl.types.versions import (
    DEFAULT_POLICY,
    SCHEMA_VERSION,
    Array,
    BoolArray,
    FinishReason,
    FloatArray,
    IntArray,
    LogprobKind,
    PolicyVersion,
    VersionSource,
    VersionSpan,
    derive_seed,
)
from nexrl.types.weights import EngineInfo, LoadAck, PauseMode, TensorInfo, WeightManifest

__all__ = [
    "CANDIDATE_IDS",
    "DEFAULT_POLICY",
    "EMPTY_PROVENANCE",
    "OUTPUT_MASK",
    "SCHEMA_VERSION",
    "Alignment",
    "Annotation",
    "Array",
    "BackwardOutput",
    "Batch",
    "BoolArray",
    "Column",
    "Completion",
    "Draw",
    "EngineInfo",
    "Failure",
    "FinishReason",
    "FloatArray",
    "ForwardOutput",
    "IntArray",
    "LedgerSnapshot",
    "LoadAck",
    "LogprobKind",
    "LossSpec",
    "MediaSpan",
    "ModelSpec",
    "OptimParams",
    "OptimResult",
    "PauseMode",
    "PolicyVersion",
    "Prompt",
    "Provenance",
    "RolloutGroup",
    "RolloutRecord",
    "RowChunk",
    "Sampling",
    "Segment",
    "TensorInfo",
    "TokenRow",
    "TrainInfo",
    "Trajectory",
    "TrajectoryStatus",
    "TruncationCause",
    "Turn",
    "VersionSource",
    "VersionSpan",
    "WeightManifest",
    "derive_seed",
]
