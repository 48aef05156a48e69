"""The control socket: a question is answered, or the person who asks is told what to do."""

from __future__ import annotations

import contextlib
import getpass
import os
import stat
import threading
from pathlib import Path

import pytest
import zmq

from powerguard.errors import DaemonUnreachable, DirectoryError
from powerguard.node.ask import Answer, Ask, Control, ask


def echo(question: Ask) -> Answer:
    return Answer(True, question.verb, {"by": question.by, "big": "x" * 100_000})


@pytest.fixture
def path(tmp_path):
    """Where the socket goes."""
    return tmp_path / "c.sock"


def test_a_question_is_answered_and_the_asker_known(path):
    """The answer is what the daemon said; it knows the user by the kernel's word."""
    with contextlib.closing(Control(path, serve=echo)):
        answer = ask(path, Ask("status", "cli"))

    assert (answer.ok, answer.text) == (True, "status")
    assert answer.data["by"] == f"cli (user {getpass.getuser()})"
    assert len(answer.data["big"]) == 100_000


def test_the_socket_is_for_its_group(path):
    """0660, and gone after close."""
    with contextlib.closing(Control(path, serve=echo)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert not path.exists()


def test_no_daemon_is_said_with_what_to_do(path):
    """No socket: one line and the next step."""
    with pytest.raises(DaemonUnreachable, match="systemctl start powerguard"):
        ask(path, Ask("status"))


@pytest.mark.slow
def test_a_daemon_that_is_silent_is_given_up(path):
    """One that doesn't answer in time is given up; a socket that a killed one left is seen at once."""
    never = threading.Event()

    def serve(question: Ask) -> Answer:
        return Answer(never.wait(3.0))

    control = Control(path, serve=serve)
    with pytest.raises(DaemonUnreachable, match="within 0"):
        ask(path, Ask("status"), wait_s=0.2)
    never.set()
    control.close()
    with zmq.Context() as dead:
        left = dead.socket(zmq.ROUTER)
        left.bind(f"ipc://{path}")
        left.close()
    assert path.exists()
    with pytest.raises(DaemonUnreachable, match="no daemon"):
        ask(path, Ask("status"))


def test_what_the_daemon_cannot_answer_is_a_refusal(path):
    """An exception in the answer is told, and the next question is answered."""

    def serve(question: Ask) -> Answer:
        if question.verb == "park":
            raise RuntimeError("planted")
        return Answer(True)

    with contextlib.closing(Control(path, serve=serve)) as control:
        refusal = ask(path, Ask("park"))
        assert not refusal.ok
        assert "planted" in refusal.text
        assert ask(path, Ask("status")).ok
        assert control.care() == ""


@pytest.mark.parametrize("frames", [[b"x"], [b"", b"pg1"], [b"", b"pg1", b"{"], [b"", b"pg9", b"{}"], [b""] * 9])
def test_nonsense_is_answered_or_dropped(path, frames):
    """Whatever comes in, the next question is answered."""
    with contextlib.closing(Control(path, serve=echo)), zmq.Context() as context:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 100)
        dealer.connect(f"ipc://{path}")
        dealer.send_multipart(frames)
        assert ask(path, Ask("status")).ok
        dealer.close()


def test_an_answer_from_another_version_is_said(path):
    """The client neither hangs nor crashes over an answer that it can't read."""
    with zmq.Context() as context:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(f"ipc://{path}")

        def answer() -> None:
            parts = router.recv_multipart()
            router.send_multipart([*parts[:2], b"pg2", b"{}"])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(DaemonUnreachable, match="newer"):
            ask(path, Ask("status"))
        thread.join()
        router.close()


def test_a_thread_that_ends_is_started_anew(path, eventually):
    """`BaseException` aside nothing ends the thread; were it to, `care` says so and starts it again."""

    def serve(question: Ask) -> Answer:
        if question.verb == "die":
            return Answer(True, "", {"x": object()})  # can't be put into JSON
        return Answer(True)

    with contextlib.closing(Control(path, serve=serve)) as control:
        with pytest.raises(DaemonUnreachable):
            ask(path, Ask("die"), wait_s=0.3)
        eventually(lambda: "had ended" in control.care() or ask(path, Ask("status")).ok)

        assert ask(path, Ask("status")).ok


def test_one_path_one_daemon(path):
    """A second daemon on the same socket is refused."""
    with contextlib.closing(Control(path, serve=echo)), pytest.raises(DirectoryError, match="another daemon"):
        Control(path, serve=echo)


@pytest.mark.root
def test_a_user_who_may_not_ask_is_told(path):
    """The socket's mode keeps others out, in words."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    with contextlib.closing(Control(path, serve=echo)):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.setuid(65534)
                try:
                    ask(Path(path), Ask("status"))
                except DaemonUnreachable as error:
                    os.write(write, str(error).encode())
            os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        said = os.read(read, 1000).decode()
        os.close(read)

    assert "may not use" in said
