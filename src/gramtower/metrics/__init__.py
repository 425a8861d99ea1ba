"""Ranking metrics, computed in blocks of users in bounded memory; docs/metrics.md has the definitions.

Each is a mean over the left entities ("users") that have relevant right entities ("items").
"""

from gramtower.metrics.definitions import DEFAULT as DEFAULT
from gramtower.metrics.definitions import KNOWN as KNOWN
from gramtower.metrics.definitions import parse as parse
from gramtower.metrics.embedding_metrics import Scores as Scores
from gramtower.metrics.embedding_metrics import evaluate_embeddings as evaluate_embeddings
from gramtower.metrics.embedding_metrics import ranking_metrics as ranking_metrics
from gramtower.metrics.off_policy_estimates import OffPolicy as OffPolicy
from gramtower.metrics.off_policy_estimates import linear_rewards as linear_rewards
from gramtower.metrics.off_policy_estimates import list_targets as list_targets
from gramtower.metrics.off_policy_estimates import off_policy as off_policy
