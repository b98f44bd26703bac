"""Built-in scorers: never right by accident, never 1 for an unreadable gold answer."""

from __future__ import annotations

import pytest

from nexrl.services.reward.scorers import boxed_math, exact_match, number_match


@pytest.mark.parametrize(
    ("completion", "value"),
    [("1", 1.0), ("21", 0.0), ("12", 0.0), ("The answer is 1.", 1.0), ("no number", 0.0)],
)
def test_number_match_compares_whole_numbers(completion: str, value: float) -> None:
    """FR-065."""
    assert number_match(completion, "1").value == value


@pytest.mark.parametrize(
    ("completion", "gold", "value"),
    [
        ("so 2 + 3 = 5", "5", 1.0),
        ("5 or 6", "5", 0.0),
        ("1/2", "0.5", 1.0),
        ("1,000", 1000, 1.0),
        ("3.0", 3, 1.0),
        ("7 - 3", "3", 1.0),
        ("7-3", "3", 1.0),
        ("it is -3", "3", 0.0),
        ("it is \u22123", "-3", 1.0),
        ("1e3", "1000", 1.0),
        ("50%", "0.5", 0.0),
        ("50 %", "50%", 1.0),
        ("1/3", "0.333", 0.0),
        ("x1", "1", 0.0),
        ("1/0", "1", 0.0),
        ("1.2.3", "1.2", 0.0),
        ("9" * 500, "9", 0.0),
        ("1e999999999", "1", 0.0),
    ],
)
def test_number_match_takes_the_last_number_exactly(
    completion: str, gold: str | int, value: float
) -> None:
    assert number_match(completion, gold).value == value


@pytest.mark.parametrize("gold", ["", "none", "1 or 2", "1/0"])
def test_number_match_with_an_unreadable_gold_is_not_scored(gold: str) -> None:
    """FR-062."""
    result = number_match("1", gold)
    assert (result.value, result.parts) == (None, {"unparsed": 1.0})


def test_listing_every_choice_earns_nothing() -> None:
    """FR-064."""
    assert exact_match("<answer>A or B or C</answer>", "A", tag="answer").value == 0.0
    assert exact_match("<answer>B</answer><answer>A</answer>", "A", tag="answer").value == 0.0
    assert exact_match("<answer> A </answer>", "A", tag="answer").value == 1.0


def test_exact_match_ignores_white_space_around_and_nothing_else() -> None:
    assert exact_match(" 4\n", "4").value == 1.0
    assert exact_match("44", "4").value == 0.0
    assert exact_match("Paris", "paris").value == 0.0
    assert exact_match("Paris", "paris", ignore_case=True).value == 1.0
    assert exact_match("anything", " ").value is None


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1/2", "0.5"),
        ("1,000", "1000"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"7.41\%", "7.41%"),
        ("(1,2)", "(1, 2)"),
        ("x=3", "3"),
        ("3.0", "3"),
        (r"\dfrac{3}{4}", "0.75"),
        (r"-\frac{1}{2}", "-0.5"),
        (r"\frac{-1}{2}", r"-\frac12"),
        (r"\left(0, \frac{1}{2}\right)", "(0,0.5)"),
        (r"\text{yes}", "yes"),
        (r"$\sqrt{2}$", r"\sqrt{2}"),
        (r"\boxed{5}", "5"),
        ("1,2", "1, 2.0"),
    ],
)
def test_boxed_math_accepts_other_spellings_of_the_same(gold: str, answer: str) -> None:
    """FR-067."""
    assert boxed_math(rf"So it is \boxed{{{answer}}}.", gold).value == 1.0
    assert boxed_math(rf"\boxed{{{gold}}}" if "boxed" not in gold else gold, answer).value == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("63/400", r"\frac{64}{400}"),
        ("1", "21"),
        ("A", "A or B or C"),
        ("50%", "0.5"),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
        (r"1\frac{1}{2}", "1.5"),
        (r"\{1,2\}", r"\{2,1\}"),
        ("(0,1)", "[0,1]"),
        ("3 cm", "3"),
        ("1/3", "0.333"),
        ("(1,2)", "1,2"),
    ],
)
def test_boxed_math_refuses_the_documented_non_equivalences(gold: str, answer: str) -> None:
    """FR-062, FR-064, FR-065, FR-067."""
    assert boxed_math(rf"\boxed{{{answer}}}", gold).value == 0.0


@pytest.mark.parametrize("gold", ["", "$ $", r"\boxed{", r"\frac{1}{2"])
def test_boxed_math_with_an_unreadable_gold_is_not_scored(gold: str) -> None:
    """FR-062: never 1."""
    assert boxed_math(r"\boxed{1}", gold).value is None


def test_an_answer_without_a_box_is_wrong_and_counted_as_unparsed() -> None:
    """FR-067: the unparsed rate is a metric."""
    result = boxed_math("The answer is 5", "5")
    assert (result.value, result.parts) == (0.0, {"correct": 0.0, "unparsed": 1.0})


def test_the_last_box_counts_with_its_braces_balanced() -> None:
    text = r"first \boxed{1}, no: \boxed{\frac{1}{2}}"
    assert boxed_math(text, "1/2").value == 1.0


def test_a_hostile_completion_takes_no_time() -> None:
    assert boxed_math(r"\boxed{" * 5000 + "1", "1").value == 0.0
    assert number_match("1," * 20000, "7").value == 0.0
    assert boxed_math(r"\boxed{" + "(" * 20000 + "}", "(1,2)").value == 0.0
