"""The connected streams end in one order, whatever the hashes of their names are."""

from dataclasses import dataclass, field

from engine_support import hello

from diloco_jax.coordinator.sessions import Sessions
from diloco_jax.protocol.messages import FromCoordinator, Hello, Welcome
from diloco_jax.wire.errors import Refused, WireError

NAMES = "dbfahgec"


@dataclass(eq=False)
class StreamOf:
    hello: Hello
    ended: list[str] = field(default_factory=list)

    def send(self, message: FromCoordinator) -> None: ...

    def close(self, refused: Refused | None = None) -> None: ...

    def fail(self, error: WireError) -> None:
        self.ended.append(self.hello.session)


def test_streams_end_in_the_order_in_which_they_came_those_that_are_served_first() -> (
    None
):
    sessions, ended = Sessions(), list[str]()
    for name in NAMES:
        sessions.arrived(StreamOf(hello(name, f"{name}.1"), ended))
    served = ["g.1", "a.1", "d.1"]
    for session in served:
        sessions.tell(
            session, Welcome(run_id="run", term=1, resumed=False, versions=())
        )
    sessions.end_all("the mandate has run out")
    assert ended == served + [f"{n}.1" for n in NAMES if f"{n}.1" not in served]
    sessions.end_all("once more")
    assert len(ended) == len(NAMES)
