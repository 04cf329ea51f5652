"""The gated delta rule: a state matrix per head that replaces the value of a key (Yang et al. 2025).

S_t = exp(a_t) S_{t-1} + k_t u_t^T with u_t = beta_t (v_t - exp(a_t) S_{t-1}^T k_t), and o_t = S_t^T
q_t. A few tokens are processed by the state after each, or by their inputs (see `staging`). By
inputs, the corrected values u of all tokens are the solution of a triangular system.
"""

from typing import NamedTuple

import torch

from outrider.models.torch.recurrent.layer import Staged, Tensors, add_entries, add_product, pick
from outrider.models.torch.recurrent.rows import Rows
from outrider.models.torch.recurrent.scan import scan
from outrider.models.torch.recurrent.staging import WayCosts, keeps_states

STATE = "state"  # [B, H, K, V] float32
STATES = "states"  # [B, E, H, K, V], by states
_KEY, _VALUE, _OWN, _DECAY = "key", "value", "own decay", "decay"  # by inputs
_COSTS = WayCosts(token_calls=7, token_moves=6, input_calls=47, input_moves=8)


class Inputs(NamedTuple):
    """New entries, float32."""

    query: torch.Tensor  # [B, L, H, K], scaled
    key: torch.Tensor  # [B, L, H, K]
    value: torch.Tensor  # [B, L, H, V]
    decay: torch.Tensor  # [B, L, H] logarithm of the decay; or [B, L, H, K], by element of the key
    beta: torch.Tensor  # [B, L, H]


def advance(staged: Staged, inputs: Inputs, rows: Rows) -> torch.Tensor:
    """Add new entries and return their outputs [B, L, H, V], float32."""
    if inputs.decay.dim() == 3:
        inputs = inputs._replace(decay=inputs.decay[..., None])
    is_first = rows.num_entries == rows.num_new
    if STATES in staged.entries or (is_first and keeps_states(staged.base[STATE], rows.num_entries, _COSTS)):
        return _advance_by_states(staged, inputs, rows)
    return _advance_by_inputs(staged, inputs, rows)


def state_after(staged: Staged, rows: Rows, last: torch.Tensor) -> Tensors:
    """Return the state [B, H, K, V] after entry `last` [B]."""
    if STATES in staged.entries:
        return {STATE: pick(staged.entries[STATES], last)}
    total = staged.entries[_DECAY]  # [B, E, H, 1 or K]
    at_last = pick(total, last)  # [B, H, 1 or K]
    on_path = pick(rows.ancestors, last)  # [B, E]
    weight = (at_last[:, None] - total).masked_fill(~on_path[..., None, None], -torch.inf).exp()
    key = (staged.entries[_KEY] * weight).permute(0, 2, 3, 1)  # [B, H, K, E]
    state = at_last.exp()[..., None] * staged.base[STATE]
    return {STATE: add_product(state, key, staged.entries[_VALUE].transpose(1, 2))}


def _advance_by_states(staged: Staged, inputs: Inputs, rows: Rows) -> torch.Tensor:
    query, key, value, decay, beta = inputs
    outputs = []

    def step(index: int, before: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(before, decay[:, index].exp()[..., None], out=out)
        known = (key[:, index, :, None] @ out)[..., 0, :]  # [B, H, V]
        corrected = beta[:, index, :, None] * (value[:, index] - known)
        out.addcmul_(key[:, index, ..., None], corrected[..., None, :])
        outputs.append((query[:, index, :, None] @ out)[..., 0, :])

    states = scan(staged.base[STATE], staged.entries.get(STATES), step, rows)
    add_entries(staged, {STATES: states})
    return torch.stack(outputs, 1)


def _advance_by_inputs(staged: Staged, inputs: Inputs, rows: Rows) -> torch.Tensor:
    query, key, value, decay, beta = inputs
    num_earlier = rows.num_entries - rows.num_new
    add_entries(staged, {_KEY: key, _OWN: decay})
    path = rows.visible.to(decay.dtype)  # [B, L, E]
    total = (path @ staged.entries[_OWN].flatten(2)).view_as(decay)  # [B, L, H, 1 or K]
    add_entries(staged, {_DECAY: total})
    visible = rows.visible[:, None]  # [B, 1, L, E]
    keys = staged.entries[_KEY]
    between = _products(key, keys, total, staged.entries[_DECAY], visible)  # [B, H, L, E]
    base = staged.base[STATE]
    steps = beta.transpose(1, 2)[..., None]  # [B, H, L, 1]
    decayed = total.exp()
    # Subtract what the state and the earlier entries know about the new keys.
    known = (key * decayed).transpose(1, 2) @ base
    if num_earlier:
        known = known + between[..., :num_earlier] @ staged.entries[_VALUE].transpose(1, 2)
    own = torch.eye(rows.num_new, dtype=torch.bool, device=key.device)
    system = (between[..., num_earlier:] * steps).masked_fill(own, 0.0)
    right = steps * (value.transpose(1, 2) - known)
    corrected = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    add_entries(staged, {_VALUE: corrected.transpose(1, 2)})
    scores = _products(query, keys, total, staged.entries[_DECAY], visible)
    out = (query * decayed).transpose(1, 2) @ base + scores @ staged.entries[_VALUE].transpose(1, 2)
    return out.transpose(1, 2)


def _products(
    left: torch.Tensor,  # [B, L, H, K]
    keys: torch.Tensor,  # [B, E, H, K]
    total: torch.Tensor,  # [B, L, H, 1 or K] logarithm of the decay from the state to each new entry
    key_total: torch.Tensor,  # [B, E, H, 1 or K] the same for all entries
    visible: torch.Tensor,  # [B, 1, L, E]
) -> torch.Tensor:
    """Return [B, H, L, E]: the products of new entries with the keys on their path, decayed on the way."""
    if total.shape[-1] == 1:
        weight = total.permute(0, 2, 1, 3) - key_total.permute(0, 2, 3, 1)  # [B, H, L, E]
        weight = weight.masked_fill(~visible, -torch.inf).exp()
        return (left.transpose(1, 2) @ keys.permute(0, 2, 3, 1)) * weight
    # exp(total - key_total) can overflow for entries that are not on the path, so each pair has its own exponent.
    weight = (total[:, :, None] - key_total[:, None]).masked_fill(~visible[:, 0, ..., None, None], -torch.inf).exp()
    return torch.einsum("blhk,behk,blehk->bhle", left, keys, weight)
