"""A run as a site, without the steps between: what is exchanged, what is saved, what is refused."""

import numpy as np
import pytest
from oracles import tiny_llama
from runs import tiny_config, write_rows
from several_sites import together

from models.parameters import by_path, split
from zagora_jax import interruption
from zagora_jax.base import open_base
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig, SitesConfig
from zagora_jax.sites.outer import Global, OuterRule
from zagora_jax.sites.site import Site, _filled, _vectors

EVERY, RULE = 2, OuterRule(0.7, 0.5)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model and rows; the parameters are those that a run's options declare."""
    folder = tmp_path_factory.mktemp("site")
    tiny_llama(folder / "model")
    write_rows(folder / "rows.jsonl", 4)
    return folder


@pytest.fixture
def make(world, tmp_path):
    """Make a site with its adapters before the first step."""

    def site(name, adapters=None, **options):
        sites = {"name": name, "folder": str(tmp_path / "shared"), "every": EVERY, "wait": 20.0}
        sites |= {"outer_learning_rate": RULE.learning_rate, "outer_momentum": RULE.momentum, "compression": "none"}
        others = {key: options.pop(key) for key in list(options) if key not in SitesConfig.model_fields}
        config = tiny_config(
            world / "model", tmp_path / name, world / "rows.jsonl", sites=SitesConfig(**sites | options), **others
        )
        lora = config.lora
        base = open_base(config.model, quantization="none", dtype="float32", lora=lora, seed=0, quantized_cache=None)
        _, _, declared = split(base.model)
        shapes = {".".join(path): variable.get_value().shape for path, variable in by_path(declared).items()}
        return Site(config, base, declared, said.append), _filled(declared, noise(shapes, 0))

    said: list[str] = []
    site.said = said
    return site


def noise(shapes, seed):
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def trained(vectors, step, number):
    """What a step makes of a site's adapter: a pull towards a point, and noise."""
    shapes, seed = {name: values.shape for name, values in vectors.items()}, 10 * step + number
    target, push = noise(shapes, seed % 10), noise(shapes, seed)
    return {name: values + np.float32(0.2) * (target[name] - values) + push[name] for name, values in vectors.items()}


def train(site, adapters, number, steps, ends=False):
    """Go from exchange to exchange, from behind step `steps.start`; the states behind each."""
    found = []
    for step in steps:
        adapters = _filled(adapters, trained(_vectors(adapters), step, number))
        if site.is_due(step, ends=ends and step == steps[-1]):
            adapters, _ = site.exchange(step, adapters, ends=ends and step == steps[-1])
        found.append(_vectors(adapters))
    return adapters, found


def begin_all(make, count, **options):
    """Sites that all begin before any of them trains."""
    sites, starts = zip(*(make(f"s{number}", **options) for number in range(count)), strict=True)
    return sites, [site.begin(start) for site, start in zip(sites, starts, strict=True)]


def reference(start, count, steps, overlap):
    """DiLoCo written out for all sites at once: what each has behind every step, and the global adapter at the end.

    With overlap, a site's exchange behind a block applies the mean of the block before, and keeps its own progress of
    this one: start of the next block = global after the block before - own pseudo-gradient of this one.
    """
    state, waiting = Global.begin(start), None
    adapters, begun, behind = [start] * count, [start] * count, [[] for _ in range(count)]

    for step in range(1, steps + 1):
        adapters = [trained(adapters[number], step, number) for number in range(count)]
        if step % EVERY == 0 or step == steps:
            gradients = [{k: begun[n][k] - adapters[n][k] for k in start} for n in range(count)]
            if waiting is not None:
                state, waiting = state.after(waiting, RULE), None
            if overlap and step < steps:
                waiting = gradients
                begun = [{k: state.adapter[k] - gradients[n][k] for k in start} for n in range(count)]
            else:
                state = state.after(gradients, RULE)
                begun = [state.adapter] * count
            adapters = begun
        for number in range(count):
            behind[number].append(adapters[number])
    return behind, state


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [6, 7])
def test_sites_are_a_plain_diloco(make, overlap, steps):
    """Bit for bit, with the last block shorter than the others or not."""
    sites, adapters = begin_all(make, 3, overlap=overlap)
    start = _vectors(adapters[0])
    jobs = [
        lambda number=number: train(sites[number], adapters[number], number, range(1, steps + 1), ends=True)[1]
        for number in range(3)
    ]
    found = together(*jobs)
    expected, state = reference(start, 3, steps, overlap)
    for number in range(3):
        for step in range(steps):
            for name, values in expected[number][step].items():
                np.testing.assert_array_equal(found[number][step][name], values, err_msg=f"{number} {step + 1} {name}")
        assert sites[number]._state.known.digest() == state.digest()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_site_alone_with_a_rate_of_one_trains_as_if_it_were_none(make, overlap):
    """Nothing that it learns is taken back, whatever is under way; what is subtracted and added costs last bits."""
    site, adapters = make("s0", outer_learning_rate=1.0, outer_momentum=0.0, overlap=overlap)
    adapters = site.begin(adapters)
    _, found = train(site, adapters, 0, range(1, 7), ends=True)
    plain = _vectors(adapters)
    for step in range(1, 7):
        plain = trained(plain, step, 0)
    for name, values in plain.items():
        np.testing.assert_allclose(found[-1][name], values, atol=1e-5)


@pytest.mark.parametrize("broken_off", [2, 3, 4, 5])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_site_goes_on_from_what_it_saved_as_if_it_had_never_been_killed(make, overlap, broken_off):
    """Whether the others have closed rounds meanwhile or wait for it; compressed, so that residuals count."""
    options = {"overlap": overlap, "compression": "int4"}
    sites, adapters = begin_all(make, 2, **options)
    unbroken = together(
        lambda: train(sites[0], adapters[0], 0, range(1, 9), ends=True)[1],
        lambda: train(sites[1], adapters[1], 1, range(1, 9), ends=True)[1],
    )
    make.said.clear()
    again, start = begin_all(make, 2, folder=f"memory://broken-{overlap}-{broken_off}", **options)

    def killed():
        present, _ = train(again[0], start[0], 0, range(1, broken_off + 1))
        saved = again[0].saved()
        train(again[0], present, 0, range(broken_off + 1, 7))  # of which nothing is left
        again[0].close()
        revived, _ = make("s0", folder=f"memory://broken-{overlap}-{broken_off}", **options)
        revived.go_on(present, saved)
        return train(revived, present, 0, range(broken_off + 1, 9), ends=True)[1]

    found = together(killed, lambda: train(again[1], start[1], 1, range(1, 9), ends=True)[1])
    for number, steps in ((0, unbroken[0][broken_off:]), (1, unbroken[1])):
        assert len(found[number]) == len(steps)
        for one, other in zip(found[number], steps, strict=True):
            for name, values in other.items():
                np.testing.assert_array_equal(one[name], values)
    assert make.said[-1].startswith("sites: s0 goes on behind round")


def test_what_is_saved_has_always_the_same_shapes(make):
    site, adapters = make("s0", compression="int8")
    site.begin(adapters)
    like = site.like_saved()
    for step in (1, 2, 3):
        adapters, _ = train(site, adapters, 0, range(step, step + 1))
        saved = site.saved()
        assert saved.keys() == like.keys()
        for part, arrays in saved.items():
            assert {name: (value.shape, value.dtype) for name, value in arrays.items()} == {
                name: (value.shape, value.dtype) for name, value in like[part].items()
            }


def test_a_signal_while_it_waits_changes_nothing(make, monkeypatch):
    site, adapters = make("s0", overlap=False)
    other, _ = make("s1")
    adapters = site.begin(adapters)
    other.begin(adapters)
    before = site.saved()
    monkeypatch.setattr(interruption, "requested", lambda: True)
    assert site.exchange(2, _filled(adapters, trained(_vectors(adapters), 1, 0)), ends=False) is None
    after = site.saved()
    for part, arrays in before.items():
        for name, values in arrays.items():
            np.testing.assert_array_equal(after[part][name], values)
    assert site.is_due(2, ends=False)


def test_a_joiner_gets_the_first_sites_adapter_whatever_its_own(make):
    _, (start,) = begin_all(make, 1)
    other, own = make("other")
    joined = other.begin(_filled(own, trained(_vectors(own), 5, 0)))
    for name, values in _vectors(start).items():
        np.testing.assert_array_equal(_vectors(joined)[name], values)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"outer_momentum": 0.9}, "sites.outer_momentum: 0.5 there, 0.9 here"),
        ({"outer_learning_rate": 1.0}, "sites.outer_learning_rate: 0.7 there, 1.0 here"),
        ({"lora": LoraConfig(rank=8, targets=["q_proj", "down_proj"])}, "lora.rank: 4 there, 8 here"),
        (
            {"lora": LoraConfig(rank=4, targets=["q_proj"])},
            r"adapter shapes: .*; lora.targets: .* there, \['q_proj'\] here",
        ),
        ({"quantization": "none"}, "quantization: 'nf4' there, 'none' here"),
    ],
)
def test_a_site_that_does_not_fit_is_refused_by_name(make, options, complaint):
    begin_all(make, 1)
    other, adapters = make("other", **options)
    with pytest.raises(UserError, match=complaint) as error:
        other.begin(adapters)
    assert "agreement.json" in str(error.value)


def test_another_model_or_tokenizer_is_refused_by_name(make, world, monkeypatch):
    begin_all(make, 1)
    other, adapters = make("other")
    tokenizer = other._base.tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    monkeypatch.setattr(type(other._base), "tokenizer", lambda _: tokenizer)
    monkeypatch.setattr(type(other._base), "fingerprint", lambda _: "another")
    with pytest.raises(UserError, match=r"base model: .* there, 'another' here; tokenizer: "):
        other.begin(adapters)


def test_a_name_that_another_run_has_is_refused(make, world, tmp_path):
    begin_all(make, 1)
    twin, adapters = make("s0")
    twin.begin(adapters)  # the same run directory: that run itself
    twin._config = twin._config.model_copy(update={"output": tmp_path / "elsewhere"})
    with pytest.raises(UserError, match="another run takes part as s0"):
        twin.begin(adapters)
    begun, adapters = make("s0")
    begun.begin(adapters)
    begun.leave()
    twin.begin(adapters)


def test_an_adapter_that_is_not_finite_is_not_sent(make):
    site, adapters = make("s0")
    adapters = site.begin(adapters)
    broken = _vectors(adapters)
    next(iter(broken.values())).flat[3] = np.nan
    with pytest.raises(UserError, match=r"step 2: the adapter's .* is not finite"):
        site.exchange(2, _filled(adapters, broken), ends=False)
    assert not [name for name in site._rounds.folder.list("rounds/000001") if name.endswith(".safetensors")]
