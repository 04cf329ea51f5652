"""The kernels of attention and layers fit the registers and the shared memory of GPUs."""

import pytest
import torch

from tests.helpers import triton as helper

# isort: split
from outrider.models.triton import attention, layers

MOST_SHARED = 99 * 1024  # bytes that a thread block may have on every chip since sm_80


def attention_launches(dim, attend=attention.attend, **options):
    """Return the launches for two rows of five tokens, with 32 heads and 8 key heads."""

    def meta(*size, dtype=torch.int32):
        return torch.empty(*size, dtype=dtype, device="meta")

    query = meta(10, 32, dim, dtype=torch.bfloat16)
    entries = meta(8, 32, 8, 2, 64, dim, dtype=torch.bfloat16)[:, 3]
    others = (meta(2, 512), meta(2), meta(10, 1, dtype=torch.int64), meta(10))
    with helper.recorded(attention) as launches:
        attend(query, entries, *others, scale=0.1, rows=2, columns=5, **options)
    return launches


def check(launches, capability, folder):
    assert launches
    for launch in launches:
        built = launch.build(capability, folder)
        assert built.stack == 0, "registers are spilled"
        assert built.shared <= MOST_SHARED


@pytest.mark.fast_cases("128-80", "128-90", "128-100")
@pytest.mark.parametrize("capability", helper.CAPABILITIES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attention_fits(dim, capability, tmp_path):
    check(attention_launches(dim), capability, tmp_path)


@pytest.mark.fast_cases("128-90", "256-80")
@pytest.mark.parametrize("capability", helper.CAPABILITIES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_prompts_fit(dim, capability, tmp_path):
    check(attention_launches(dim, attention.attend_prompt), capability, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("attend", [attention.attend, attention.attend_prompt])
@pytest.mark.parametrize("capability", helper.CAPABILITIES)
def test_every_option_fits(attend, capability, tmp_path):
    sinks = torch.empty(32, dtype=torch.bfloat16, device="meta")
    check(attention_launches(128, attend, window=1024, softcap=30.0, sinks=sinks), capability, tmp_path)


@pytest.mark.slow
def test_overlapping_kernels_fit(tmp_path):
    launches = attention_launches(128, shape=attention.Shape(overlaps=True))
    assert launches[1].options["launch_pdl"]
    check(launches, 90, tmp_path)


def test_layers_fit(tmp_path):
    def meta(*size, dtype=torch.bfloat16):
        return torch.empty(*size, dtype=dtype, device="meta")

    def index(*size):
        return meta(*size, dtype=torch.int32)

    entries = meta(8, 32, 8, 2, 64, 128)
    angles = meta(4096, 64, dtype=torch.float32)
    with helper.recorded(layers) as launches:
        norms = (meta(128), meta(128))
        layers.rotate_and_write(
            meta(10, 6144), angles, angles, index(10), index(10), index(2, 512), entries[:, 3], *norms
        )
        layers.rotate_and_write(
            meta(10, 2048), meta(9, 1), meta(9, 1), index(10), index(10), index(2, 512), entries[:, 3]
        )
        layers.rms_norm(meta(10, 4096), meta(4096), 1e-5)
    assert len(launches) == 3
    check(launches, 90, tmp_path)
