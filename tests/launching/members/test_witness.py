"""The record of a job's rounds in a folder and in a real etcd, and launchers that meet through it."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.errors import PacelineError
from paceline.launching.members.etcd import Etcd, list_servers
from paceline.launching.members.open_witness import open_witness
from paceline.launching.members.shared_folder import SharedFolder
from paceline.launching.members.witness import Entry, Witness, WitnessError, WitnessThread
from paceline.launching.members.world import Member, NodeWorld
from tests.launching.launched import Launched, paceline_run, script

ETCD = next((path for name in ("etcd", "/usr/bin/etcd") if (path := shutil.which(name))), None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EtcdServer:
    """A real etcd, without its v2 interface, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port, peer = free_port(), free_port()
        client, peers = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{peer}"
        self._command = [str(ETCD), "--data-dir", str(folder / "etcd"), "--enable-v2=false"]
        self._command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        self._command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        self._command += ["--initial-cluster", f"default={peers}"]

    def __enter__(self) -> EtcdServer:
        with (self._folder / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        end_s = time.monotonic() + 20
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1).close()
                return self
            except OSError:
                assert time.monotonic() < end_s, (self._folder / "etcd.log").read_text()[-2000:]
                time.sleep(0.1)

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait(10)


@contextmanager
def a_folder(folder: Path) -> Iterator[Callable[[str], Witness]]:
    yield lambda job: SharedFolder(folder / "witness", job)


@contextmanager
def an_etcd(folder: Path) -> Iterator[Callable[[str], Witness]]:
    if ETCD is None:
        pytest.skip("etcd is not installed (tests/install_components.sh)")
    with EtcdServer(folder) as server:
        yield lambda job: Etcd([f"http://127.0.0.1:{server.port}"], job)


def entry(number: int, name: str = "a", *, is_final: bool = False) -> Entry:
    member = Member(f"key-{name}", name, "10.0.0.1", 1)
    return Entry(number, NodeWorld(number, (member,), 1, 2), is_final)


@pytest.mark.parametrize("made", [a_folder, an_etcd])
def test_the_first_to_append_a_number_has_it(made: Callable[..., object], tmp_path: Path) -> None:
    with made(tmp_path) as open_record:  # type: ignore[attr-defined]
        one, other = open_record("j"), open_record("j")
        assert one.read() is None
        assert one.append(entry(1))
        assert not other.append(entry(1, "b"))
        assert other.read() == entry(1)
        assert not other.append(entry(3)), "numbers have no gaps"
        assert other.append(entry(2, "b", is_final=True))
        assert one.read() == entry(2, "b", is_final=True)
        assert open_record("j/2").read() is None, "each job has a record of its own"
        member = Member("k", "node0", "10.0.0.1", 5)
        one.register(member)
        assert other.list_launchers() == [member]
        one.unregister(member)
        assert other.list_launchers() == []


def append_at_once(record: Witness, mine: Entry, begin: threading.Barrier, won: list[str]) -> None:
    begin.wait()
    if record.append(mine):
        won.append(mine.world.members[0].name)


@pytest.mark.parametrize("made", [a_folder, an_etcd])
def test_of_many_that_append_at_once_one_has_it(made: Callable[..., object], tmp_path: Path) -> None:
    with made(tmp_path) as open_record:  # type: ignore[attr-defined]
        for number in range(1, 11):
            won: list[str] = []
            begin = threading.Barrier(8)

            threads = [
                threading.Thread(
                    target=append_at_once, args=(open_record("j"), entry(number, f"n{i}"), begin, won)
                )
                for i in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(won) == 1
            assert open_record("j").read() == entry(number, won[0])


def test_what_is_no_entry_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "j"
    folder.mkdir()
    (folder / "entry-00000001.json").write_text('{"number": 1}')
    with pytest.raises(WitnessError, match="not an entry"):
        SharedFolder(tmp_path, "j").read()


def test_a_server_without_the_v3_interface_is_reported() -> None:
    """As etcd 3.3 and older answer, or another program."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            link, _ = server.accept()
            with link:
                link.recv(4096)
                link.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(WitnessError, match="it has no v3 interface") as raised:
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


def test_torchs_backend_without_its_library_is_refused() -> None:
    words = ["--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "127.0.0.1:1"]
    command = paceline_run("--nnodes", "1:2", *words, script("steps.py"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if importlib.util.find_spec("etcd") is not None:
        pytest.skip("the client library is installed")
    assert done.returncode == 2
    assert "--rdzv-backend etcd-v2: No module named" in done.stderr
    assert "Use --rdzv-backend etcd, which needs no library" in done.stderr
    assert "Traceback" not in done.stderr


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


def test_a_witness_over_tls_needs_a_certificate_that_is_trusted(
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
        with pytest.raises(WitnessError, match="CERTIFICATE_VERIFY_FAILED"):
            open_witness(place, "j").read()
        monkeypatch.setenv("ETCDCTL_CACERT", certificate[0])
        assert open_witness(place, "j").read() is None
        monkeypatch.delenv("ETCDCTL_CACERT")
        monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
        assert open_witness(place, "j").read() is None


@pytest.mark.parametrize("name", ["ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"])
def test_certificates_that_cannot_be_read_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/missing.pem")
    with pytest.raises(PacelineError, match="PL384") as raised:
        open_witness("https+etcd://a", "j")
    assert f"{name}=/missing.pem" in raised.value.saw
    assert open_witness("etcd://a", "j").name == "http://a:2379", "it needs none"


class Listener:
    """The part of a launcher that a witness answers to."""

    def __init__(self) -> None:
        self.heard: list[Entry | None] = []
        self.records: list[Entry] = []

    def heard_witness(self, last: Entry | None, launchers: list[Member], now: float) -> None:
        self.heard.append(last)

    def recorded(self, last: Entry, now: float) -> None:
        self.records.append(last)


def test_an_entry_is_appended_as_soon_as_the_witness_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "witness"
    place.write_text("not a folder yet")
    listener, me = Listener(), Member("k", "node0", "10.0.0.1", 5)
    thread = WitnessThread(SharedFolder(place, "j"), me, lambda call: call())
    thread.start(listener)
    thread.append(entry(1))
    end_s = time.monotonic() + 10
    while not thread.trouble:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert listener.records == []
    place.unlink()
    thread.read()
    while not listener.heard:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    thread.end()
    assert listener.records == [entry(1)]
    assert listener.heard == [entry(1)]
    assert SharedFolder(place, "j").list_launchers() == [], "it takes itself off at its end"
    assert "does not answer" in caplog.text


@pytest.mark.parametrize("text", ["http://etcd0:2379", "etcd3://a", "", " "])
def test_a_place_that_is_no_witness_is_refused(text: str) -> None:
    with pytest.raises(PacelineError, match="PL380"):
        open_witness(text, "j")


def test_an_address_of_etcd_is_refused_with_how_to_write_it() -> None:
    with pytest.raises(PacelineError) as raised:
        open_witness("https://a:1,b", "j")
    assert raised.value.fix == "For an etcd, write https+etcd://a:1,b."


def test_places_of_witnesses() -> None:
    assert list_servers("etcd0,[::1]:12379") == ["http://etcd0:12379", "http://[::1]:12379"]
    assert list_servers("etcd0") == ["http://etcd0:2379"]
    assert open_witness("https+etcd://a:1,b", "j").name == "https://a:1,https://b:1"
    assert open_witness("/shared/w", "j").name == "/shared/w"


def test_a_witness_without_c10d_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", leave)
    with pytest.raises(SystemExit):
        main(["run", "--witness", "/tmp/w", script("sums.py")])
    assert codes == [2]
    assert "[PL380]" in capsys.readouterr().err


def test_the_state_of_a_job_whose_record_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--status", "--rdzv-backend", "etcd", "--rdzv-id", "j"]
    assert main([*words, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]) == 2
    assert "[PL381]" in capsys.readouterr().err


# ---- launchers


def check_meet(folder: Path, *words: str) -> None:
    """Two launchers find each other through the record, and all ranks succeed."""
    flags = ["--nnodes", "2", "--rdzv-id", "j", *words, "--local-addr", "127.0.0.1"]
    command = paceline_run(*flags, script("sums.py"))
    with ExitStack() as stack:
        jobs = [stack.enter_context(Launched(folder / str(n), command)) for n in range(2)]
        codes = [job.wait(100) for job in jobs]
        assert codes == [0, 0], "\n".join(job.text for job in jobs)


@pytest.mark.timeout(150)
def test_launchers_meet_through_a_folder(tmp_path: Path) -> None:
    check_meet(tmp_path, "--rdzv-backend", "folder", "--rdzv-endpoint", str(tmp_path / "witness"))
    last = SharedFolder(tmp_path / "witness", "j").read()
    assert last is not None
    assert last.is_final
    assert len(last.world.members) == 2
    assert SharedFolder(tmp_path / "witness", "j").list_launchers() == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_goes_on_over_an_etcd_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    """While it is away, a round trains on; after the loss of a node, the next begins once it is back."""
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
        assert await_more(count() + 20, 20), "it trains on"
        jobs[2].process.kill()
        for job in jobs[:2]:
            job.wait_for("the nodes have changed", 20)
        end_s = time.monotonic() + 20
        while not any("does not answer" in job.text for job in jobs):  # the one that leads asks
            assert time.monotonic() < end_s
            time.sleep(0.1)
        before = count()
        assert not await_more(before, 5), "no round begins without a record"
        server.__enter__()
        assert await_more(before + 5, 30), "\n".join(job.text for job in jobs)
        for job in jobs[:2]:
            job.wait_for(r"on 2 nodes", 20)
