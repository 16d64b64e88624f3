"""What every attention keeps: lengths, masks, batch mates, padding, precision."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wellcond.attention import ATTENTIONS, AttentionLayer, find_attention, register_attention

SETTINGS = {"skyformer": {"num_landmarks": 6}, "nystrom": {"num_landmarks": 4}}
CASES = [(name, SETTINGS.get(name, {})) for name in ATTENTIONS]
CASES += [
    ("skyformer", {"num_landmarks": 6, "landmarks": "segment"}),
    ("skyformer", {"num_landmarks": 6, "solver": "iteration"}),
    ("skyformer", {"num_landmarks": 6, "kernel": "softmax"}),
]
every = pytest.mark.parametrize(("name", "settings"), CASES, ids=str)


def function(name: str, settings: dict) -> Callable[..., Tensor]:
    return lambda *args: find_attention(name).function(*args, **settings)


def parts(*lead: int, n: int = 9, m: int | None = None, p: int = 5, c: int = 3, dtype: torch.dtype = torch.float64):
    m = n if m is None else m
    return [torch.randn(*lead, *shape, dtype=dtype) for shape in ((n, p), (m, p), (m, c))]


@pytest.mark.parametrize("name", ATTENTIONS)
@given(n=st.integers(1, 12), m=st.integers(1, 12), p=st.integers(1, 7), c=st.integers(1, 7), lead=st.integers(0, 3))
def test_lengths_widths_and_leading_dimensions(name: str, n: int, m: int, p: int, c: int, lead: int) -> None:
    torch.manual_seed(n + 13 * m)
    attend = function(name, SETTINGS.get(name, {}))
    q, k, v = parts(*[2] * lead, n=n, m=m, p=p, c=c)
    out = attend(q, k, v)
    assert out.shape == (*[2] * lead, n, c)
    assert out.isfinite().all()
    if lead:
        torch.testing.assert_close(out[1], attend(q[1], k[1], v[1]))


@every
def test_samples_do_not_know_each_other(name: str, settings: dict) -> None:
    attend = function(name, settings)
    q, k, v = parts(3, 2)
    mask = torch.rand(3, 1, 1, 9) > 0.4
    size = 5 if settings.get("kernel") == "softmax" else 50  # which refuses tokens that are too far apart
    for attn_mask in (None, mask):
        out = attend(q, k, v, attn_mask)
        others = [t.clone() for t in (q, k, v)]
        for t in others:
            t[1:] = size * torch.randn_like(t[1:])
        changed = None if attn_mask is None else torch.cat([attn_mask[:1], ~attn_mask[1:]])
        assert torch.equal(attend(*others, changed)[0], out[0])


@every
def test_padding_never_changes_a_row_that_counts(name: str, settings: dict) -> None:
    attend = function(name, settings)
    q, k, v = parts(2, 2, n=9)
    alone = attend(q, k, v)
    for order in (torch.arange(14), torch.randperm(14)):  # behind the tokens, and anywhere among them
        kept = order.argsort()[:9].sort().values
        padded = [t.new_full((2, 2, 14, t.shape[-1]), 7.0) for t in (q, k, v)]
        for whole, t in zip(padded, (q, k, v), strict=True):
            whole[:, :, kept] = t
        mask = torch.zeros(14, dtype=torch.bool).index_fill(0, kept, True)[None, None, None]
        torch.testing.assert_close(attend(*padded, mask)[:, :, kept], alone, rtol=1e-9, atol=1e-10)
        for whole in padded:
            whole[:, :, ~mask[0, 0, 0]] *= -3
        torch.testing.assert_close(attend(*padded, mask)[:, :, kept], alone, rtol=1e-9, atol=1e-10)


@every
def test_a_sample_without_keys_gets_zeros(name: str, settings: dict) -> None:
    attend = function(name, settings)
    q, k, v = (t.requires_grad_() for t in parts(2, 2, dtype=torch.float32))
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[1] = False
    out = attend(q, k, v, mask)
    assert (out[1] == 0).all()
    torch.testing.assert_close(out[0], attend(q, k, v)[0], rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    for t in (q, k, v):
        assert t.grad.isfinite().all()
        assert (t.grad[1] == 0).all()


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [1e-5, 1.0, 1e4])
@pytest.mark.parametrize("alike", [False, True])
def test_half_precision_is_finite_where_the_result_fits(name, settings, dtype, norm, alike) -> None:
    """And infinite, not NaN, where it does not: sums over keys may be larger than float16's 65,504."""
    q, k, v = parts(2, 2, dtype=torch.float32)
    q, k = (torch.nn.functional.normalize(t, dim=-1).mul(norm).to(dtype) for t in (q, k))
    v = v.to(dtype)
    if alike:  # every token the same, and the values too
        q = k = v = q[:, :, :1].expand_as(q)
    if settings.get("kernel") == "softmax" and norm == 1e4 and not alike:  # nothing is left of its rows
        with pytest.raises(ValueError, match="lost in rounding"):
            function(name, settings)(q, k, v)
        return
    out = function(name, settings)(q, k, v)
    exact = function(name, settings)(q.double(), k.double(), v.double())
    most = torch.finfo(dtype).max
    assert out.dtype == dtype
    assert out[exact.abs() < 0.99 * most].isfinite().all()
    assert not out.isnan().any()
    beyond = exact.abs() > 1.01 * most
    assert torch.equal(out[beyond].double(), exact[beyond].sign() * torch.inf)
    sums = name in ("kernelized", "skyformer") and settings.get("kernel") != "softmax"
    assert beyond.any() == (dtype == torch.float16 and norm == 1e4 and (name == "linear" or (sums and alike)))


@every
def test_autocast_takes_tokens_as_torch_does_and_changes_nothing_inside(name: str, settings: dict) -> None:
    q, k, v = parts(2, 2, dtype=torch.float32)
    expected = function(name, settings)(*(t.bfloat16() for t in (q, k, v)))
    assert expected.dtype == torch.bfloat16
    for tokens in ((q, k, v), (q, k, v.bfloat16()), (q.half(), k, v)):  # norms of queries and keys give float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = function(name, settings)(*tokens)
        if tokens[0].dtype == torch.float32:
            assert torch.equal(out, expected)
        assert out.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(name, settings)(*(t.double() for t in (q, k, v)))
    torch.testing.assert_close(out, function(name, settings)(*(t.double() for t in (q, k, v))), rtol=0, atol=0)


@every
def test_on_no_device_at_all(name: str, settings: dict) -> None:
    """The meta device tells shapes, and costs nothing."""
    q, k, v = (t.to("meta").requires_grad_() for t in parts(2, 2))
    out = function(name, settings)(q, k, v)
    out.sum().backward()
    assert (out.device.type, out.shape, q.grad.shape) == ("meta", v.shape, q.shape)
    with pytest.raises(ValueError, match="on one device"):
        function(name, settings)(torch.zeros_like(q, device="cpu"), k, torch.zeros_like(v, device="cpu"))


@every
def test_one_token(name: str, settings: dict) -> None:
    q, k, v = parts(2, 2, n=1)
    out = function(name, settings)(q, k, v)
    if name in ("softmax", "nystrom") or settings.get("kernel") == "softmax":
        torch.testing.assert_close(out, v)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_exported_layer_takes_any_batch(name: str) -> None:
    layer = find_attention(name).layer(12, num_heads=3, **SETTINGS.get(name, {})).eval()
    x = torch.randn(2, 20, 12)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for batch in (1, 5):
        x = torch.randn(batch, 20, 12)
        torch.testing.assert_close(program.module()(x), layer(x))


def test_every_attention_has_its_three_forms() -> None:
    for name, kind in ATTENTIONS.items():
        assert kind.name == name
        assert isinstance(kind.layer, type)
        assert issubclass(kind.layer, AttentionLayer)
        core = kind.core().eval()
        assert kind.core(**core.settings).settings == core.settings
        q, k, v = parts(2, 2)
        assert torch.equal(core(q, k, v), kind.function(q, k, v))


def test_an_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"there are kernelized, linear, nystrom, skyformer, softmax; .* import the"):
        find_attention("xyzzy")
    with pytest.raises(ValueError, match=r"no attention 'nystromer'; did you mean nystrom\?"):
        find_attention("nystromer")


def test_a_decorator_without_its_name_registers_nothing() -> None:
    before = dict(ATTENTIONS)
    with pytest.raises(TypeError, match=r'write @register_attention\("name"\)'):
        register_attention(lambda query, key, value: value)  # pyright: ignore[reportArgumentType]
    assert before == ATTENTIONS
