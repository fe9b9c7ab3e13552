"""From what a user writes to a checked reference: files, modules, names, signatures, columns, and every refusal."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_fixtures.reward_samples import sample

from grpoctl.errors import InputRefused, UsageError
from grpoctl.rewards.resolve.columns_check import refuse_unscorable_inputs
from grpoctl.rewards.resolve.reference import check_columns, resolve_reward
from grpoctl.rewards.resolve.signature import Parameter, detected_signature
from grpoctl.rewards.resolve.source import static_parameters

FIXTURES = Path(__file__).parent / "reward_fixtures"
USER = FIXTURES / "user_rewards.py"


@pytest.fixture(autouse=True)
def _this_process_must_not_import_user_code(monkeypatch):
    monkeypatch.setenv("PYTEST_PID", str(os.getpid()))


def resolved(function, **given):
    return resolve_reward(f"{USER}:{function}", **given)


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        ("newcomer", "row"),
        ("typed", "row"),
        ("keyword_only", "row"),
        ("positional_only", "row"),
        ("trl_style", "trl"),
        ("trl_async", "trl"),
        ("multi_task", "trl"),
        ("verl_style", "verl"),
        ("verl_batch_style", "verl_batch"),
        ("openrlhf_style", "openrlhf"),
        ("ids_of_batches", "trl"),
        ("ids_of_one", "row"),
        ("decorated", "row"),
        ("judge", "row"),
        ("partial", "verl"),
    ],
)
def test_the_signature_is_told_from_the_parameter_names(function, signature):
    reference = resolved(function)
    assert (reference.signature, reference.kind, reference.name) == (signature, "file", function)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("ids_of_which", r"cannot tell how to call \(completion_ids\): the names fit no known signature"),
        ("mixed", r"cannot tell how to call \(completions, completion\): the names fit both trl and row"),
        ("unknown", r"cannot tell how to call \(text, gold\).*signature: row \| trl \| verl \| verl_batch \| openrlhf"),
    ],
)
def test_an_unclear_signature_is_refused_with_the_way_to_say_it(function, message):
    with pytest.raises(UsageError, match=message):
        resolved(function)


def test_a_signature_can_be_said():
    assert resolved("ids_of_which", signature="row").signature == "row"
    with pytest.raises(UsageError, match="signature is 'tlr'; expected auto or one of row, trl, verl"):
        resolved("newcomer", signature="tlr")
    with pytest.raises(UsageError, match="signature is 'trl', but a builtin is called as row"):
        resolve_reward("accuracy", signature="trl")


def test_arguments_bound_by_the_user_count_as_given():
    assert resolved("verl_style", kwargs={"bonus": 1.0}).kwargs == {"bonus": 1.0}
    with pytest.raises(UsageError, match=r"it takes no argument 'bonsu' \(did you mean bonus\?\)"):
        resolved("verl_style", kwargs={"bonsu": 1.0})
    with pytest.raises(UsageError, match=r"called as verl it gets data_source.*nothing provides 'completion'"):
        resolved("newcomer", signature="verl")
    with pytest.raises(UsageError, match=r"called as openrlhf it gets \(queries, prompts, labels\); it takes 2"):
        resolved("newcomer", signature="openrlhf")


def test_a_factory_is_recognised_and_called_with_its_arguments():
    reference = resolved("make_length_reward", kwargs={"limit": 3}, name="short")
    assert (reference.signature, reference.target.factory, reference.name) == ("trl", True, "short")


def test_the_digest_is_that_of_the_file():
    assert resolved("newcomer").source_digest == hashlib.sha256(USER.read_bytes()).hexdigest()


def test_a_module_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "shop" / "rewards"
    package.mkdir(parents=True)
    (tmp_path / "shop" / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "__init__.py").write_text("from shop.rewards.price import price")
    (package / "price.py").write_text("def price(completion): return 1.0")
    monkeypatch.chdir(tmp_path)
    reference = resolve_reward("shop.rewards.price:price")
    assert (reference.kind, reference.signature, reference.name) == ("module", "row", "price")
    assert "shop" not in sys.modules


def test_a_re_export_is_found_by_a_child_and_the_digest_covers_both_files(tmp_path, monkeypatch):
    (tmp_path / "front.py").write_text("from back import reward")
    (tmp_path / "back.py").write_text("def reward(completions, **kwargs): return [1.0] * len(completions)")
    monkeypatch.chdir(tmp_path)
    before = resolve_reward("front:reward")
    assert (before.signature, before.kind) == ("trl", "module")
    (tmp_path / "back.py").write_text("def reward(completions, **kwargs): return [2.0] * len(completions)")
    assert resolve_reward("front:reward").source_digest != before.source_digest


def test_an_entry_point_is_a_name_of_its_own(tmp_path, monkeypatch):
    folder = tmp_path / "shop-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[grpoctl.rewards]\nfair_price = shop_rewards:price\n")
    (tmp_path / "shop_rewards.py").write_text("def price(completion): return 1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    reference = resolve_reward("fair_price")
    assert (reference.kind, reference.name, reference.signature) == ("entry_point", "fair_price", "row")


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        (f"{USER}:newcommer", r"has no function 'newcommer' \(did you mean newcomer\?\)"),
        (
            f"{FIXTURES}/user_reward.py:newcomer",
            r"there is no file .*user_reward.py \(did you mean user_rewards.py\?\)",
        ),
        (f"{USER}", r"say which function, as in .*user_rewards.py:newcomer; it has newcomer, typed"),
        ("no_such_module.rewards:reward", "there is no module no_such_module.rewards"),
        ("sys:exit", "there is no module sys in the working directory"),
        ("acuracy", r"no built-in and no entry point of that name \(did you mean accuracy\?\)"),
    ],
)
def test_what_is_not_there_is_named_with_the_closest_that_is(ref, message):
    with pytest.raises(UsageError, match=message):
        resolve_reward(ref)


def test_a_name_must_be_able_to_name_a_column():
    with pytest.raises(UsageError, match="'a b' cannot name a column"):
        resolve_reward("accuracy", name="a b")


@pytest.mark.parametrize(
    ("function", "columns", "message"),
    [
        (
            "newcomer",
            ["anwser", "level"],
            r"parameter `answer` needs a column answer; the columns are anwser, level \(did you mean anwser",
        ),
        ("newcomer", [], "the columns are none; rename the parameter or the column"),
        ("trl_async", ["solution"], "parameter `answer` needs a column answer; the columns are solution"),
        (
            "verl_style",
            ["data_source"],
            "parameter `ground_truth` needs a column reward_model.ground_truth or ground_truth or answer",
        ),
        ("verl_style", ["answer"], "parameter `data_source` needs a column data_source"),
        ("verl_batch_style", ["answer"], "parameter `data_sources` needs a column data_source"),
        ("openrlhf_style", ["question"], "parameter `labels` needs a column label or labels or answer"),
    ],
)
def test_a_needed_value_that_no_column_has_is_refused_before_any_call(function, columns, message):
    with pytest.raises(InputRefused, match=message):
        check_columns(resolved(function), columns)


@pytest.mark.parametrize(
    ("function", "columns"),
    [
        ("newcomer", ["answer"]),
        ("typed", []),
        ("keyword_only", []),
        ("verl_style", ["data_source", "reward_model"]),
        ("verl_style", ["data_source", "reward_model.ground_truth"]),
        ("openrlhf_style", ["label"]),
        ("multi_task", ["task", "answer"]),
    ],
)
def test_columns_that_are_enough_pass(function, columns):
    check_columns(resolved(function), columns)


def test_a_built_in_names_its_option():
    with pytest.raises(
        InputRefused, match="option `column` needs a column answer; the columns are solution; name the right one"
    ):
        check_columns(resolve_reward("accuracy"), ["solution"])
    check_columns(resolve_reward("accuracy", kwargs={"column": "solution"}), ["solution"])
    check_columns(resolve_reward("format"), [])


def test_a_null_reference_is_refused_with_its_row():
    rows = [sample(index=0, source={"answer": "1"}), sample(index=1, source={"answer": None})]
    for reference in (resolve_reward("accuracy"), resolved("newcomer"), resolved("trl_async")):
        with pytest.raises(InputRefused, match=r"answer is null in row p0@0#1; expected a value in every row"):
            refuse_unscorable_inputs(reference, rows)
    nested = sample(index=2, source={"data_source": "d", "reward_model": {"ground_truth": None}})
    with pytest.raises(
        InputRefused, match=r"reward_model\.ground_truth or ground_truth or answer is null in row p0@0#2"
    ):
        refuse_unscorable_inputs(resolved("verl_style"), [nested])


def test_a_null_is_the_function_s_own_business_where_it_says_so():
    rows = [sample(source={"answer": None, "task": "code"})]
    refuse_unscorable_inputs(resolved("multi_task"), rows)
    refuse_unscorable_inputs(resolved("newcomer", allow_null=True), rows)


def test_openrlhf_needs_the_prompt_as_text():
    messages = [{"role": "user", "content": "q"}]
    with pytest.raises(InputRefused, match="the prompt of row p0@0#0 is a list of messages"):
        refuse_unscorable_inputs(resolved("openrlhf_style"), [sample(prompt=messages, source={"label": "1"})])
    refuse_unscorable_inputs(
        resolved("openrlhf_style"), [sample(prompt=messages, prompt_text="<user>q", source={"label": "1"})]
    )


NAMES = st.sampled_from(
    ["completion", "completions", "prompts", "solution_str", "queries", "labels", "answer", "x", "sample"]
)


@given(st.lists(NAMES, unique=True, max_size=5), st.permutations(range(5)))
def test_the_order_of_parameters_never_changes_the_signature(names, order):
    def verdict(ordered):
        parameters = [Parameter(name=n, kind="any", required=True, annotation="") for n in ordered]
        try:
            return detected_signature(parameters, bound={}, ref="r")
        except UsageError:
            return "refused"

    shuffled = [names[i] for i in order if i < len(names)]
    assert verdict(names) == verdict(shuffled)


@given(st.lists(st.sampled_from("abcdefg"), unique=True, min_size=1, max_size=6), st.data())
def test_reading_the_source_tells_the_same_as_inspecting_the_function(names, data):
    import inspect

    cuts = sorted(data.draw(st.lists(st.integers(0, len(names)), min_size=2, max_size=2)))
    defaults = data.draw(st.integers(0, cuts[1]))
    written = [name + ("=1" if cuts[1] - defaults <= i < cuts[1] else "") for i, name in enumerate(names)]
    parts = [*written[: cuts[0]], *(["/"] if cuts[0] else []), *written[cuts[0] : cuts[1]]]
    parts += ["*", *written[cuts[1] :]] if cuts[1] < len(names) else []
    source = f"def f({', '.join(parts)}): ..."
    space: dict = {}
    exec(source, space)
    kinds = {"POSITIONAL_ONLY": "positional", "POSITIONAL_OR_KEYWORD": "any", "KEYWORD_ONLY": "keyword"}
    expected = [
        (p.name, kinds[p.kind.name], p.default is p.empty) for p in inspect.signature(space["f"]).parameters.values()
    ]
    found = static_parameters(source.encode(), "f")
    assert [(p.name, p.kind, p.required) for p in found] == expected
