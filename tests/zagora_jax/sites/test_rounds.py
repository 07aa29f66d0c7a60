"""How sites agree: with sites that are missing, late, slow, killed, and with files that are damaged."""

import json
import threading
import time

import pytest
from several_sites import RULE, SHAPES, begin, site, together, update, vectors

from zagora_jax.errors import UserError
from zagora_jax.sites import rounds as module
from zagora_jax.sites.outer import OuterRule
from zagora_jax.sites.rounds import Closing, StoppedError
from zagora_jax.sites.updates import update_file

SHORT = 1.0  # seconds that a round waits, where somebody is missing


@pytest.fixture
def url(tmp_path):
    return str(tmp_path / "shared")


@pytest.fixture
def join(url, tmp_path):
    """Make a site that others wait for from the first round on."""

    def make(name, **options):
        one, said = site(url, name, tmp_path / "scratch", **options)
        one.announce(0)
        one.said = said
        return one

    return make


def send(one, state, seed, compression="none", skip=0):
    return lambda: one.exchange(state, update(seed, compression), threading.Event(), skip)


def until_posted(one, number):
    for _ in range(2000):
        if one.has_posted(number):
            return
        time.sleep(0.01)
    raise TimeoutError


def after_posted(one, number, job):
    """Do it once the site has posted its update of a round."""
    return lambda: (until_posted(one, number), job())[1]


def mean_of(state, *seeds):
    return state.after([vectors(seed) for seed in seeds], RULE)


@pytest.mark.parametrize("compression", ["none", "int8", "int4"])
def test_all_sites_compute_the_same_bits(join, compression):
    sites = [join(f"s{number}") for number in range(3)]
    state = begin()
    for number in range(3):
        jobs = [send(one, state, 10 * number + seed, compression) for seed, one in enumerate(sites)]
        found = together(*jobs)
        assert {one.counted for one in found} == {("s0", "s1", "s2")}
        assert len({one.state.digest() for one in found}) == 1
        updates = [update(10 * number + seed, compression).vectors(SHAPES) for seed in range(3)]
        assert found[0].state.digest() == state.after(updates, RULE).digest()
        state = found[0].state
    assert state.round == 3


def test_a_site_that_dies_is_waited_for_once(join):
    first, second, dead = join("first"), join("second"), join("dead")
    state = together(*(send(one, begin(), seed) for seed, one in enumerate([first, second, dead])))[0].state
    del dead
    first._wait = second._wait = SHORT
    found = together(send(first, state, 3), send(second, state, 4))
    assert found[0].counted == ("first", "second")
    assert min(one.seconds for one in found) >= SHORT * 0.9
    assert found[0].state.digest() == mean_of(state, 3, 4).digest()
    first._wait = second._wait = 30.0
    found = together(send(first, found[0].state, 5), send(second, found[0].state, 6))
    assert found[0].counted == ("first", "second")
    assert max(one.seconds for one in found) < 15


def test_the_one_who_would_have_closed_the_round_may_die(join):
    """Its update is there, and counts; any other site closes."""
    dead, other = join("dead"), join("other")
    dead._post(begin(), update(1))
    found = send(other, begin(), 2)()
    assert found.counted == ("dead", "other")
    assert found.state.digest() == mean_of(begin(), 1, 2).digest()


def test_two_who_close_a_round_at_once_agree(join, monkeypatch):
    """One saw an update more than the other; who comes second takes what the first has written."""
    early, late = join("early", wait=0.05), join("late")
    closings = []
    create = module.Folder.create

    def slowly(folder, name, content):
        if name.endswith("closed.json"):
            closings.append(json.loads(content)["counted"].keys())
            if len(closings) == 1:
                late._post(begin(), update(2))
                assert late._close_if(begin(), is_late=True)
        return create(folder, name, content)

    monkeypatch.setattr(module.Folder, "create", slowly)
    found = send(early, begin(), 1)()
    assert [sorted(names) for names in closings] == [["early"], ["early", "late"]]
    assert found.counted == ("early", "late")
    assert send(late, begin(), 2)().state.digest() == found.state.digest()


def test_a_late_joiner_begins_with_the_newest_global_adapter(join, url, tmp_path):
    first, second = join("first"), join("second")
    first.begin(vectors(0), True)
    state = begin()
    for number in range(2):
        state = together(send(first, state, number), send(second, state, 5 + number))[0].state
    late, _ = site(url, "late", tmp_path / "scratch")
    for own_start in (begin(), None):  # the same first adapter, or another
        assert late.newest(own_start).digest() == state.digest()
    assert late.announce(2) == 4
    found = together(send(first, state, 7), send(second, state, 8))  # who do not wait for it yet
    state = found[0].state
    assert found[0].counted == ("first", "second")
    found = together(send(first, state, 9), send(second, state, 10), send(late, state, 11))
    assert found[0].counted == ("first", "late", "second")
    assert len({one.state.digest() for one in found}) == 1


def test_a_site_that_leaves_is_not_waited_for(join):
    first, second = join("first"), join("second")
    state = together(send(first, begin(), 1), send(second, begin(), 2))[0].state
    second.leave(state.round)
    found = send(first, state, 3)()
    assert found.counted == ("first",)
    assert found.seconds < 10


def test_a_slow_sites_update_counts_in_the_round_that_is_open_when_it_comes(join):
    fast, slow = join("fast", wait=SHORT), join("slow")
    state = send(fast, begin(), 1)().state
    state = send(fast, state, 2)().state
    assert state.round == 2
    found = together(send(slow, begin(), 3), after_posted(slow, 3, send(fast, state, 4)))
    assert [one.counted for one in found] == [("fast", "slow")] * 2
    assert found[0].state.digest() == mean_of(state, 4, 3).digest()


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-3], lambda content: b"PK\x03\x04" + content, lambda _: b"", lambda c: c[::-1]]
)
def test_a_damaged_update_is_named_and_left_out(join, tmp_path, damage):
    one, two = join("one", wait=SHORT), join("two")
    content = update_file(update(2), site="two", round_number=1)
    two.folder.write("rounds/000001/two.safetensors", damage(content))
    found = send(one, begin(), 1)()
    assert found.counted == ("one",)
    assert [text for text in one.said if "left out of round 1: rounds/000001/two.safetensors" in text]
    # Who sent it sees that it does not count, and sends it again.
    found = together(after_posted(two, 2, send(one, found.state, 3)), send(two, begin(), 2))
    assert [one.counted for one in found] == [("one", "two")] * 2


def test_an_update_that_is_still_being_written_is_waited_for(join):
    one, two = join("one"), join("two")
    content = update_file(update(2), site="two", round_number=1)
    two.folder.write("rounds/000001/two.safetensors", content[:100])
    threading.Timer(0.5, lambda: two.folder.write("rounds/000001/two.safetensors", content)).start()
    assert send(one, begin(), 1)().counted == ("one", "two")
    assert one.said == []


def test_an_update_of_other_shapes_is_left_out(join):
    one, other = join("one", wait=SHORT), join("other")
    other.folder.write("rounds/000001/other.safetensors", update_file(update(2, "int4"), site="third", round_number=1))
    assert send(one, begin(), 1)().counted == ("one",)
    assert "site: expected 'other', found 'third'" in one.said[0]


def test_a_site_that_was_killed_finds_its_update_and_the_same_outcome(join, url, tmp_path):
    """It comes back from an earlier step: what counted then counts, and no file is written again."""
    one, two = join("one"), join("two")
    before = together(send(one, begin(), 1), send(two, begin(), 2))[0].state
    after = together(send(one, before, 3), send(two, before, 4))[0].state
    again, _ = site(url, "one", tmp_path / "scratch")
    assert send(again, begin(), 1)().state.digest() == before.digest()
    assert send(again, before, 3)().state.digest() == after.digest()
    assert again.folder.sent == 0


def test_a_site_that_goes_on_waits_for_those_who_counted_before(join, url, tmp_path):
    one, two = join("one"), join("two")
    state = together(send(one, begin(), 1), send(two, begin(), 2))[0].state
    again, _ = site(url, "one", tmp_path / "scratch")
    stop = threading.Event()
    threading.Timer(0.7, stop.set).start()
    with pytest.raises(StoppedError):
        again.exchange(state, update(3), stop)
    assert again.has_posted(2)
    assert again.newest_closed() == 1


def test_an_earlier_runs_update_of_the_same_name_is_not_taken_for_this_ones(join, url, tmp_path):
    one, two = join("one"), join("two")
    one._post(begin(), update(9))  # and is killed before anything is saved
    again, _ = site(url, "one", tmp_path / "scratch")
    results = together(
        send(again, begin(), 1, skip=1),
        lambda: [send(two, begin(), 2)(), after_posted(again, 2, send(two, mean_of(begin(), 9, 2), 3))()],
    )
    assert results[0].counted == ("one", "two")
    assert results[0].state.round == 2
    assert results[1][1].state.digest() == results[0].state.digest()


def test_rounds_that_are_published_as_a_whole_are_removed(join, url, tmp_path, monkeypatch):
    """And a site that was away so long begins with what is published."""
    monkeypatch.setattr(module, "SNAPSHOT_EVERY", 2)
    one = join("one")
    one.begin(vectors(0), True)
    state = begin()
    for seed in range(1, 8):
        state = send(one, state, seed)().state
    assert sorted(one.folder.list("globals")) == ["000004.safetensors", "000006.safetensors"]
    assert sorted(one.folder.list("rounds"))[0] == "000005"
    away, _ = site(url, "away", tmp_path / "scratch", wait=SHORT)
    assert away.newest(begin()).digest() == state.digest()
    found = send(away, begin(), 9)()
    assert found.state.digest() == mean_of(state, 9).digest()
    # One of the two is damaged: the other one, and the rounds behind it, make the same.
    one.folder.write("globals/000008.safetensors", b"damaged")
    other, said = site(url, "other", tmp_path / "scratch")
    assert other.newest(None).digest() == found.state.digest()
    assert [text for text in said if "globals/000008.safetensors" in text]


def test_an_update_that_counts_and_is_gone_ends_the_site_by_name(join, url, tmp_path):
    one, two = join("one"), join("two")
    together(send(one, begin(), 1), send(two, begin(), 2))
    one.folder.write("rounds/000001/two.safetensors", b"lost")
    late, _ = site(url, "late", tmp_path / "scratch", wait=SHORT)
    with pytest.raises(UserError, match=r"rounds/000001/two\.safetensors.*--resume"):
        send(late, begin(), 3)()


def test_a_damaged_closing_ends_the_site_by_name(join, url, tmp_path):
    one = join("one")
    send(one, begin(), 1)()
    content = one.folder.read("rounds/000001/closed.json")
    one.folder.write("rounds/000001/closed.json", content.replace(b'"by": "one"', b'"by": "two"'))
    late, said = site(url, "late", tmp_path / "scratch", wait=SHORT)
    with pytest.raises(UserError, match=r"closed\.json: is damaged.*remove the file"):
        send(late, begin(), 3)()
    assert len(said) == 1
    late.folder.remove("rounds/000001/closed.json")
    assert send(late, begin(), 3)().counted == ("late", "one")


def test_a_machine_that_reckons_otherwise_is_told(join, url, tmp_path):
    send(join("one"), begin(), 1)()
    other, _ = site(url, "other", tmp_path / "scratch", rule=OuterRule(0.5, 0.9))
    with pytest.raises(UserError, match="one has computed another global adapter"):
        send(other, begin(), 2)()


def test_a_site_whose_updates_never_count_gives_up(join):
    one = join("one")
    for number in range(1, module.MOST_LEFT_OUT + 1):
        one.folder.write(f"rounds/00000{number}/other.joins", b"1")  # so that it does not close rounds itself
    state = begin()

    def without_it():
        nonlocal state
        for number in range(1, module.MOST_LEFT_OUT + 1):
            until_posted(one, number)
            state = state.after([], RULE)
            one.folder.create(f"rounds/00000{number}/closed.json", Closing({}, state.digest(), "other").content())

    error, _ = together(send(one, begin(), 1), without_it)
    assert isinstance(error, UserError)
    assert "3 updates of one in a row were there and did not count; the last round was closed by other" in str(error)


def test_a_folder_that_cannot_be_reached_is_tried_again_and_named(join, monkeypatch):
    one = join("one", wait=SHORT)
    read, failures = one.folder.read, iter(range(3))

    def sometimes(name):
        if next(failures, None) is not None:
            raise OSError(5, "the line is down", name)
        return read(name)

    monkeypatch.setattr(one.folder, "read", sometimes)
    assert send(one, begin(), 1)().counted == ("one",)
    assert one.said == ["warning: sites: [Errno 5] the line is down: 'rounds/000001/closed.json'; tried again for 1 s"]
    monkeypatch.setattr(one.folder, "read", lambda name: (_ for _ in ()).throw(OSError(5, "down", name)))
    with pytest.raises(UserError, match=r"for 1 s: .*down.*--resume"):
        send(one, begin(), 1)()


def test_rounds_that_were_removed_are_not_opened_again(join, url, tmp_path):
    one = join("one")
    state = send(one, begin(), 1)().state
    send(one, state, 2)()
    one.folder.remove("rounds/000001")
    other, _ = site(url, "other", tmp_path / "scratch")
    for attempt in (lambda: other.newest(begin()), send(other, begin(), 3)):
        with pytest.raises(UserError, match="round 2 is closed, but round 1 is not there"):
            attempt()


def test_a_joiner_waits_for_what_the_first_site_is_about_to_publish(join, url, tmp_path):
    first = join("first")
    other, _ = site(url, "other", tmp_path / "scratch")
    threading.Timer(0.3, lambda: first.begin(vectors(0), True)).start()
    assert other.newest(None).digest() == begin().digest()
    never, _ = site(str(tmp_path / "empty"), "never", tmp_path / "scratch", wait=0.1)
    with pytest.raises(UserError, match="no global adapter to begin with"):
        never.newest(None)


def test_a_file_that_is_far_too_large_is_not_even_read(join):
    one, two = join("one", wait=SHORT), join("two")
    two.folder.write("rounds/000001/two.safetensors", bytes(100_000))
    assert send(one, begin(), 1)().counted == ("one",)
    assert "100,000 bytes, where" in one.said[0]
    assert one.folder.received < 10_000
