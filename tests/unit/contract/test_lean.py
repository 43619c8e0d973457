"""Long-lived messages share the sets of their field names."""

from trainium_contract.wire.messages import HeartbeatRequest

IDENTITY = {"namespace": "team", "job": "llama", "generation": 1}


def heartbeat(step: int, **more: object) -> HeartbeatRequest:
    progress = {"step": step, "loss": 2.0, "samples": 1, "memoryStep": 1, "durableStep": 0}
    reported = {"phase": "Training", "progress": progress, **more}
    return HeartbeatRequest.model_validate(IDENTITY | {"podName": f"w-{step}", "podUid": f"uid-{step}"} | reported)


def test_lean_messages_share_their_field_sets() -> None:
    first, second = heartbeat(1).share_fields_set(), heartbeat(2).share_fields_set()
    assert first.__pydantic_fields_set__ is second.__pydantic_fields_set__
    assert first.progress is not None
    assert second.progress is not None
    assert first.progress.__pydantic_fields_set__ is second.progress.__pydantic_fields_set__
    assert heartbeat(3, attempt=1).share_fields_set().model_fields_set == first.model_fields_set | {"attempt"}


def test_messages_in_a_list_are_lean_too() -> None:
    failure = {
        "sequence": 0,
        "generation": 1,
        "attempt": 0,
        "rank": 0,
        "exitCode": 1,
        "step": 1,
        "message": "",
        "at": 1.0,
    }
    first, second = (heartbeat(1, failures=[failure | {"sequence": number}]).share_fields_set() for number in (1, 2))
    assert first.failures[0].__pydantic_fields_set__ is second.failures[0].__pydantic_fields_set__


def test_a_lean_message_keeps_its_values_and_its_copies_do_not_change_it() -> None:
    lean = heartbeat(1).share_fields_set()
    assert lean == heartbeat(1)
    assert lean.to_wire() == heartbeat(1).to_wire()
    assert lean.model_dump(exclude_unset=True) == heartbeat(1).model_dump(exclude_unset=True)
    changed = (lean.replaced(attempt=3), lean.model_copy(update={"attempt": 3}))
    assert [message.model_fields_set - lean.model_fields_set for message in changed] == [{"attempt"}, {"attempt"}]
    assert "attempt" not in heartbeat(2).share_fields_set().model_fields_set
