"""The stores of a job's record: a folder, a real etcd and torch's TCPStore; and launchers that meet there."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.errors import PacelineError
from paceline.launching.elastic import tcp_record
from paceline.launching.elastic.tcp_record import TcpRecord
from paceline.launching.members.etcd import Etcd, list_servers
from paceline.launching.members.open_store import open_store
from paceline.launching.members.pulse import change_record, read_record
from paceline.launching.members.record import (
    MOST_BYTES,
    JobNode,
    Record,
    Terms,
    from_text,
    to_text,
)
from paceline.launching.members.shared_folder import SharedFolder
from paceline.launching.members.store import Store, StoreError
from tests.launching.etcd_server import ETCD, EtcdServer, free_port
from tests.launching.launched import Launched, paceline_run, script


@contextmanager
def a_folder(folder: Path) -> Iterator[Callable[[str], Store]]:
    yield lambda job: SharedFolder(folder / "meeting", job)


@contextmanager
def an_etcd(folder: Path) -> Iterator[Callable[[str], Store]]:
    if ETCD is None:
        pytest.skip("etcd is not installed (tests/install_components.sh)")
    with EtcdServer(folder) as server:
        yield lambda job: Etcd([f"http://127.0.0.1:{server.port}"], job)


@contextmanager
def a_tcp_store(folder: Path) -> Iterator[Callable[[str], Store]]:
    place = "127.0.0.1", free_port()
    host = TcpRecord(place, "host", "127.0.0.1")
    assert host.is_host
    assert not TcpRecord(place, "another launcher here", "127.0.0.1").is_host
    yield lambda job: TcpRecord(place, job, None)


STORES = [a_folder, an_etcd, a_tcp_store]


@pytest.mark.parametrize("made", STORES)
def test_a_record_is_replaced_by_who_has_read_it_last(made: Callable[..., object], tmp_path: Path) -> None:
    with made(tmp_path) as open_it:  # type: ignore[attr-defined]
        one, other = open_it("j"), open_it("j")
        assert one.read() is None
        assert one.replace(1, None, "first")
        assert not other.replace(1, None, "too late")
        assert other.read() == b"first"
        assert other.replace(2, b"first", "second")
        assert not one.replace(2, b"first", "too late again")
        assert one.read() == b"second"
        assert open_it("j/2").read() is None, "each job has a record of its own"
        one.beat("a", "1")
        one.beat("b", "7")
        assert other.read_beats(["a", "missing", "b"]) == [b"1", None, b"7"]
        one.end_beats("a")
        assert other.read_beats(["a", "b"]) == [None, b"7"]


@pytest.mark.parametrize("made", STORES)
def test_no_change_of_many_at_once_is_lost(made: Callable[..., object], tmp_path: Path) -> None:
    def count(store: Store) -> None:
        def change(record: Record) -> bool:
            record.losses["n"] = record.losses.get("n", 0) + 1
            return True

        for _ in range(5):
            change_record(store, change)

    with made(tmp_path) as open_it:  # type: ignore[attr-defined]
        threads = [threading.Thread(target=count, args=(open_it("j"),)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        record = read_record(open_it("j").read())
    assert (record.losses["n"], record.number) == (30, 30)


def test_what_is_no_record_is_reported_and_never_run() -> None:
    good = to_text(Record())
    assert from_text(good) == Record()
    bad = [
        *("", "[]", "7", '{"number": 1}', "[" * 100_000, good.replace('"round": 1', '"round": "x"')),
        *(good.replace('"numbers": {}', '"numbers": {"a": 0}'), good.replace("{}", "[7]"), good[:-9]),
        *(
            " " * (MOST_BYTES + 1),
            "\ud800",
            '{"a":' * 100_000,
            good.replace('"paceline": 1', '"paceline": 2'),
        ),
        *(good.replace('"gone": {}', '"gone": {"a": 7}'), "\x80\x04cos\nsystem\n(S'true'\ntR."),
    ]
    for text in bad:
        with pytest.raises(StoreError):
            read_record(text.encode("utf-8", "surrogatepass"))


def test_a_tcp_store_that_was_started_again_is_no_store_of_this_job() -> None:
    place = "127.0.0.1", free_port()
    host, client = TcpRecord(place, "j", "127.0.0.1"), TcpRecord(place, "j", None)
    assert client.replace(1, None, "x")
    assert client.read() == b"x"
    host._client = None
    with pytest.raises(StoreError) as raised:
        client.read()
    assert not raised.value.is_final
    again = TcpRecord(place, "j", "127.0.0.1")
    assert again.is_host
    with pytest.raises(StoreError, match="without the state of the job") as raised:
        client.read()
    assert raised.value.is_final


def test_a_beat_that_no_store_has_taken_is_not_told_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_record, "_CALL_S", 0.5)
    place = "127.0.0.1", free_port()
    host = TcpRecord(place, "j", "127.0.0.1")
    is_cut = threading.Event()

    def forward(one: socket.socket, other: socket.socket) -> None:
        while words := one.recv(4096):
            if not is_cut.is_set():
                other.sendall(words)

    with ExitStack() as stack:
        front = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = TcpRecord(front.getsockname(), "j", None)

        def serve() -> None:
            # The first connection only asks whether something listens.
            stack.enter_context(front.accept()[0])
            near, far = front.accept()[0], socket.create_connection(place, 2)
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=forward, args=(one, other), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        client.beat("a", "1")
        assert host.read_beats(["a"]) == [b"1"]
        is_cut.set()
        with pytest.raises(StoreError, match="no answer"):
            client.beat("a", "2")
        assert host.read_beats(["a"]) == [b"1"]


def test_strangers_at_the_port_of_a_tcp_store_learn_and_change_nothing() -> None:
    place = "127.0.0.1", free_port()
    host, client = TcpRecord(place, "j", "127.0.0.1"), TcpRecord(place, "j", None)
    assert client.replace(1, None, "x")
    long = b"[" * 200_000
    status = b'{"kind": "status", "job": "j"}'
    for words in (os.urandom(5000), long, status, b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096, b""):
        for head in (b"", struct.pack(">I", len(words)), struct.pack(">I", 1 << 30)):
            with socket.create_connection(place, 2) as link, suppress(OSError):
                link.sendall(head + words)
                link.settimeout(0.1)
                assert link.recv(100) == b""
    client.beat("a", "1")
    assert (client.read(), host.read(), client.read_beats(["a"])) == (b"x", b"x", [b"1"])


def test_a_server_without_the_v3_interface_is_reported() -> None:
    """As etcd 3.3 and older answer, or another program."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            link, _ = server.accept()
            with link:
                link.recv(4096)
                link.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(StoreError, match="it has no v3 interface") as raised:
            Etcd([f"http://127.0.0.1:{server.getsockname()[1]}"], "j").read()
        assert raised.value.is_final


def test_a_launcher_does_not_wait_for_a_server_without_the_v3_interface() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    link, _ = server.accept()
                    with link:
                        link.recv(4096)
                        link.sendall(
                            b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                        )

        threading.Thread(target=answer, daemon=True).start()
        words = ["--rdzv-backend", "etcd", "--rdzv-endpoint", f"127.0.0.1:{server.getsockname()[1]}"]
        command = paceline_run("--nnodes", "1:2", *words, script("steps.py"))
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "it has no v3 interface: it is an etcd older than 3.4, or no etcd" in done.stderr
    assert "[PL381]" in done.stderr


def test_torchs_own_backend_for_etcd_is_refused() -> None:
    words = ["--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "127.0.0.1:1"]
    command = paceline_run("--nnodes", "1:2", *words, script("steps.py"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Use --rdzv-backend etcd, which needs no library" in done.stderr


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """A certificate of 127.0.0.1 that nobody trusts, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    names = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    words += ["-out", names[0], "-keyout", names[1], "-subj", "/CN=etcd", "-days", "2"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(words, check=True, capture_output=True)
    return names


def test_a_store_over_tls_needs_a_certificate_that_is_trusted(
    certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                with suppress(OSError), context.wrap_socket(server.accept()[0], server_side=True) as link:
                    asked = link.recv(4096)
                    while asked and not asked.endswith(b"}"):
                        asked += link.recv(4096)
                    body = b'{"header": {"revision": "7"}}'  # of an etcd 3.5 without such a key
                    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                    link.sendall(head.encode() + body)
                if server.fileno() < 0:
                    return

        threading.Thread(target=answer, daemon=True).start()
        place = f"https+etcd://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(StoreError, match="CERTIFICATE_VERIFY_FAILED"):
            open_store("etcd", place, "j").read()
        monkeypatch.setenv("ETCDCTL_CACERT", certificate[0])
        assert open_store("etcd", place, "j").read() is None
        monkeypatch.delenv("ETCDCTL_CACERT")
        monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
        assert open_store("etcd", place, "j").read() is None


@pytest.mark.parametrize("name", ["ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"])
def test_certificates_that_cannot_be_read_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/missing.pem")
    with pytest.raises(PacelineError, match="PL384") as raised:
        open_store("etcd", "https+etcd://a", "j")
    assert f"{name}=/missing.pem" in raised.value.saw
    assert open_store("etcd", "a", "j").name == "http://a:2379", "it needs none"


@pytest.mark.parametrize("place", [("etcd", "http://etcd0:2379"), ("etcd", ""), ("folder", " ")])
def test_a_place_that_is_no_store_is_refused(place: tuple[str, str]) -> None:
    with pytest.raises(PacelineError, match="PL380"):
        open_store(*place, "j")


def test_an_address_of_etcd_is_refused_with_how_to_write_it() -> None:
    with pytest.raises(PacelineError) as raised:
        open_store("etcd", "https://a:1,b", "j")
    assert raised.value.fix == "For an etcd with TLS, write https+etcd://a:1,b."


def test_places_of_stores() -> None:
    assert list_servers("etcd0,[::1]:12379") == ["http://etcd0:12379", "http://[::1]:12379"]
    assert open_store("etcd", "etcd0", "j").name == "http://etcd0:2379"
    assert open_store("etcd", "https+etcd://a:1,b", "j").name == "https://a:1,https://b:1"
    assert open_store("folder", "/shared/w", "j").name == "/shared/w"


def test_the_state_of_a_job_whose_store_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--status", "--rdzv-backend", "etcd", "--rdzv-id", "j"]
    assert main([*words, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]) == 2
    assert "[PL381]" in capsys.readouterr().err


STATUS = """\
job j: frozen, round 4, 1 to 2 nodes
number  node   address   ranks  state
0       node1  10.0.0.2  8      here
1       node2  10.0.0.3  8      silent
waits   node3  10.0.0.4  8      silent
gone: node0 (10.0.0.1), no beat for 3 s
refused: node4 (10.0.0.5), the job has --nnodes 1:2, and this node has 2:2
"""


def test_the_state_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = SharedFolder(tmp_path, "j")
    words = ["run", "--status", "--rdzv-backend", "folder", "--rdzv-id", "j", "--detect-s", "0.5"]
    words += ["--rdzv-endpoint", str(tmp_path)]
    assert main(words) == 1
    assert "job j: non-existent" in capsys.readouterr().out

    def change(record: Record) -> bool:
        nodes = [JobNode(f"k{i}", f"node{i}", f"10.0.0.{i + 1}", nproc=8) for i in range(4)]
        record.terms, record.round, record.is_complete = Terms(1, 2), 4, True
        record.nodes = {node.key: node for node in nodes}
        record.numbers, record.spares = {"k1": 0, "k2": 1, "k0": 2}, ["k3"]
        record.remove("k0", "no beat for 3 s", is_lost=True)
        record.refused = {"node4 (10.0.0.5)": Terms(2, 2).compare(record.terms)}
        return True

    change_record(store, change)
    ends = threading.Event()

    def beat() -> None:
        number = 0
        while not ends.wait(0.02):
            number += 1
            store.beat("k1", str(number))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert main(words) == 0
    finally:
        ends.set()
        thread.join()
    assert capsys.readouterr().out == STATUS
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "frozen"


# ---- launchers


@pytest.mark.timeout(150)
def test_launchers_meet_through_a_folder(tmp_path: Path) -> None:
    """And again, under the same name."""
    words = ["--rdzv-backend", "folder", "--rdzv-endpoint", str(tmp_path / "meeting")]
    flags = ["--nnodes", "2", "--rdzv-id", "j", *words, "--local-addr", "127.0.0.1"]
    command = paceline_run(*flags, script("sums.py"))
    for number in (1, 2):
        with ExitStack() as stack:
            jobs = [stack.enter_context(Launched(tmp_path / f"{number}{n}", command)) for n in range(2)]
            codes = [job.wait(100) for job in jobs]
            assert codes == [0, 0], "\n".join(job.text for job in jobs)
            assert f"round {number} on 2 nodes" in jobs[0].text
        record = read_record(SharedFolder(tmp_path / "meeting", "j").read())
        assert (record.ended, record.nodes, record.round) == ("done", {}, number + 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_goes_on_over_an_etcd_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    """While it is away, a round trains on for some time; the next one waits for it."""
    if ETCD is None:
        pytest.skip("etcd is not installed (tests/install_components.sh)")
    steps = tmp_path / "steps.jsonl"

    def count() -> int:
        return len(steps.read_text().splitlines()) if steps.exists() else 0

    def await_more(than: int, seconds: float) -> bool:
        end_s = time.monotonic() + seconds
        while count() <= than and time.monotonic() < end_s:
            time.sleep(0.1)
        return count() > than

    with ExitStack() as stack:
        server = EtcdServer(tmp_path)
        server.__enter__()
        stack.callback(lambda: server.__exit__())
        flags = ["--nnodes", "1:3", "--max-restarts", "3", "--rdzv-id", "j", "--local-addr", "127.0.0.1"]
        flags += ["--rdzv-backend", "etcd", "--rdzv-endpoint", f"127.0.0.1:{server.port}"]
        command = paceline_run(*flags, script("steps.py"), str(tmp_path))
        jobs = [stack.enter_context(Launched(tmp_path / str(n), command)) for n in range(3)]
        for job in jobs:
            job.wait_for(r"on 3 nodes", 120)
        assert await_more(5, 60)
        server.__exit__()
        assert await_more(count() + 10, 20), "it trains on"
        jobs[2].process.kill()
        for job in jobs[:2]:
            job.wait_for("does not answer", 20)
            job.wait_for("the nodes have changed", 20)
        before = count()
        assert not await_more(before, 5), "no round begins without a record"
        server.__enter__()
        assert await_more(before + 5, 30), "\n".join(job.text for job in jobs)
        for job in jobs[:2]:
            job.wait_for(r"on 2 nodes", 20)
