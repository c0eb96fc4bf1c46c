"""Flax modules: torsos turn an observation into features, heads turn features into distributions
or values, actors and critics join the two.
"""

from mava.networks.attention import AttentionCritic, StackedDense, StackedMLP
from mava.networks.feed_forward import FeedForwardActor, FeedForwardCritic
from mava.networks.heads import (
    CategoricalHead,
    MultiCategoricalHead,
    TanhNormalHead,
    ValueHead,
    make_action_head,
)
from mava.networks.mixing import LinearMixer
from mava.networks.recurrent import RecurrentActor, RecurrentCritic, RecurrentTorso
from mava.networks.torsos import CNNTorso, MLPTorso

__all__ = [
    "AttentionCritic",
    "CNNTorso",
    "CategoricalHead",
    "FeedForwardActor",
    "FeedForwardCritic",
    "LinearMixer",
    "MLPTorso",
    "MultiCategoricalHead",
    "RecurrentActor",
    "RecurrentCritic",
    "RecurrentTorso",
    "StackedDense",
    "StackedMLP",
    "TanhNormalHead",
    "ValueHead",
    "make_action_head",
]
