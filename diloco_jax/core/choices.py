"""What can be chosen of the mathematics, by name: for the config and for what does it.

Apart from what does it, since a config is read where JAX is not loaded.
"""

from typing import Literal

CodecName = Literal["f32", "bf16", "int8", "int4"]
Weighting = Literal["tokens", "tokens_times_rate", "uniform"]
MergeRule = Literal["rda", "mean"]
AdoptRule = Literal["keep", "rebase", "overwrite", "blend"]
FragmentBy = Literal["size", "layer", "tensor"]
OuterName = Literal["sgd", "nesterov"]
Schedule = Literal["cosine", "constant"]
