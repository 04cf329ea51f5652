"""Models and machines that several tests estimate."""

from dataclasses import replace

from outrider.scale.estimate.equations import Attention, Efficiency, Machine, Model
from outrider.scale.estimate.machines import GPU, Kind, MachineOverrides, efficiencies, find_machine
from outrider.scale.estimate.models import Bits, read_model
from outrider.scale.estimate.pair import Acceptance, Drafting, Pair

MACHINE = Machine(name="machine", bandwidth=100.0, bf16=1000.0, int8=2000.0)
IDEAL = Efficiency(
    name="ideal",
    bandwidth=1.0,
    arithmetic=1.0,
    exposed=0.0,
    round_seconds=0.0,
    layer_seconds=0.0,
    allreduce_seconds=0.0,
)
SMALL = Model(name="small", layers=2, weights=50.0, attention=(Attention(numbers=1.0, products=1.0),))


def llama(hidden, layers, heads, kv_heads, ffn, vocab, *, bits=16.0, tied=False):
    settings = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    return replace(read_model(settings, Bits(weights=bits), name="llama"), int8=False)


BASE = llama(768, 12, 12, 4, 2048, 12288, tied=True)  # the pair of docs/explanation/performance.md
DRAFT = llama(256, 3, 4, 2, 704, 12288, tied=True)
LLAMA_7B = (4096, 32, 32, 32, 11008, 32000)
LLAMA_70B = (8192, 80, 64, 8, 28672, 32000)


def pairs(target, machine, *, kind: Kind = GPU, drafting=None, acceptance=None, devices=1, **given):
    """Return the pessimistic, middle and optimistic pair."""
    hardware, _ = find_machine(machine, MachineOverrides(devices=devices))
    return [
        Pair(
            target=target,
            drafting=drafting or Drafting(),
            acceptance=acceptance or Acceptance(rates=(0.8,), repeat_last=True),
            machine=hardware,
            efficiency=efficiency,
        )
        for efficiency in efficiencies(kind, given)
    ]
