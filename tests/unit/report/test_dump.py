"""debug.dump: every message of the chosen kinds, readable after a crash, without secrets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nexrl.errors import ServiceError
from nexrl.report.dump import DumpRecorder, read_dump, read_headers, recording
from nexrl.types import IntArray, Prompt, Sampling

MakeRecorder = Callable[..., DumpRecorder]


class EchoService:
    """A service with an async verb, a sync verb, a failing verb and a property."""

    build = "echo 1.0"

    async def generate(self, prompt: Prompt, *, sampling: Sampling, n: int = 1) -> list[IntArray]:
        return [prompt.token_ids] * n

    def activate(self, version: int) -> None:
        self.version = version

    async def pause(self, reason: object) -> None:
        raise ServiceError("engine answered 500") from ConnectionError("reset")


@pytest.fixture
def make_recorder(tmp_path: Path) -> Iterator[MakeRecorder]:
    made: list[DumpRecorder] = []

    def make(**fields: Any) -> DumpRecorder:
        header = {"config": {"seed": 1, "api_key": "sk-secret"}, "code_version": "abc"}
        made.append(DumpRecorder(tmp_path, **{"kinds": ["inference"], "header": header, **fields}))
        return made[-1]

    yield make
    for recorder in made:
        recorder.close()


async def generate(service: EchoService, length: int = 3) -> None:
    await service.generate(Prompt(token_ids=np.arange(length, dtype=np.int32)), sampling=Sampling())


async def test_a_call_is_recorded_with_arguments_result_step_and_times(
    tmp_path: Path, make_recorder: MakeRecorder
) -> None:
    recorder = make_recorder()
    service = recording(EchoService(), "inference", recorder)
    recorder.begin_step(7)
    await generate(service)
    service.activate(3)
    first, second = read_dump(tmp_path / "inference.msgpack")
    assert (first.method, first.step, first.error, second.sequence) == ("generate", 7, "", 2)
    assert first.arguments[0][0]["token_ids"].tolist() == [0, 1, 2]
    assert first.arguments[1]["sampling"]["max_tokens"] == 256
    assert first.result[0].tolist() == [0, 1, 2]
    assert first.finished_s >= first.started_s > 0
    assert (second.method, second.arguments) == ("activate", [[3], {}])


async def test_an_error_is_recorded_with_its_cause_and_raised_unchanged(
    tmp_path: Path, make_recorder: MakeRecorder
) -> None:
    service = recording(EchoService(), "inference", make_recorder())
    with pytest.raises(ServiceError, match="engine answered 500"):
        await service.pause(object())
    [message] = read_dump(tmp_path / "inference.msgpack")
    assert message.error == "ConnectionError: reset"
    assert message.arguments[0][0]["unsendable"] == "object"


async def test_the_header_holds_configuration_and_code_version_without_secrets(
    tmp_path: Path, make_recorder: MakeRecorder
) -> None:
    await generate(recording(EchoService(), "inference", make_recorder()))
    [header] = read_headers(tmp_path / "inference.msgpack")
    assert header["code_version"] == "abc"
    assert header["config"] == {"seed": 1, "api_key": "***"}


async def test_only_every_nth_step_is_recorded(tmp_path: Path, make_recorder: MakeRecorder) -> None:
    recorder = make_recorder(every_steps=3)
    service = recording(EchoService(), "inference", recorder)
    for step in range(7):
        recorder.begin_step(step)
        await generate(service)
    assert [m.step for m in read_dump(tmp_path / "inference.msgpack")] == [0, 3, 6]


def test_a_kind_that_is_not_wanted_is_not_wrapped(make_recorder: MakeRecorder) -> None:
    service = EchoService()
    assert recording(service, "train", make_recorder()) is service


def test_attributes_that_are_no_verbs_pass_through(make_recorder: MakeRecorder) -> None:
    assert recording(EchoService(), "inference", make_recorder()).build == "echo 1.0"


async def test_a_file_cut_at_any_byte_yields_its_whole_messages_and_can_be_continued(
    tmp_path: Path, make_recorder: MakeRecorder
) -> None:
    path = tmp_path / "inference.msgpack"
    service = recording(EchoService(), "inference", make_recorder())
    await generate(service)
    one = path.stat().st_size
    await generate(service)
    whole = path.read_bytes()
    for cut in range(one, len(whole), 7):
        path.write_bytes(whole[:cut])
        assert len(list(read_dump(path))) == 1
    await generate(recording(EchoService(), "inference", make_recorder()))
    assert len(list(read_dump(path))) == 2
    assert len(read_headers(path)) == 2
