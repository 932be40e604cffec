import os
import socket
import stat

import pytest

from scheduler.serve.listen import ListenError, UnixListener, listen_tcp


@pytest.fixture
def socket_path(tmp_path):
    return tmp_path / "lockstep.sock"


def _close(sockets):
    for sock in sockets:
        sock.close()


def test_port_zero_takes_a_free_port_that_answers():
    sockets = listen_tcp("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    socket.create_connection(("127.0.0.1", port), timeout=10).close()
    _close(sockets)


def test_every_address_of_a_name_listens_on_the_same_port():
    sockets = listen_tcp("localhost", 0)
    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    _close(sockets)


WAY_OUT = "choose another with --jsonl-port or LOCKSTEP_JSONL_PORT"


def test_a_port_in_use_is_refused_in_one_line_naming_it_and_the_way_out():
    sockets = listen_tcp("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    with pytest.raises(
        ListenError, match=rf"^cannot listen on 127\.0\.0\.1:{port}: address already in use; {WAY_OUT}$"
    ):
        listen_tcp("127.0.0.1", port, "jsonl_port")
    _close(sockets)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, "203.0.113.7"])
def test_a_host_that_is_not_ours_is_refused_in_one_line_naming_it(host):
    with pytest.raises(ListenError, match=f"^cannot listen on {host}:0: .+$"):
        listen_tcp(host, 0)


def test_the_socket_file_of_a_dead_server_is_replaced(socket_path):
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(socket_path))
    dead.close()
    listener = UnixListener(socket_path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(socket_path))
    listener.close()


def test_a_socket_that_a_server_answers_is_left_to_it(socket_path):
    alive = UnixListener(socket_path)
    with pytest.raises(ListenError, match="another server listens there"):
        UnixListener(socket_path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(socket_path))
    alive.close()


@pytest.mark.parametrize("kind", ["file", "folder", "symlink", "fifo"])
def test_what_is_not_a_socket_is_never_deleted(socket_path, tmp_path, kind):
    if kind == "file":
        socket_path.write_text("precious")
    elif kind == "folder":
        socket_path.mkdir()
    elif kind == "fifo":
        os.mkfifo(socket_path)
    else:
        (tmp_path / "target").write_text("precious")
        socket_path.symlink_to(tmp_path / "target")
    before = socket_path.lstat()
    with pytest.raises(ListenError, match="is not a socket"):
        UnixListener(socket_path)
    assert socket_path.lstat().st_ino == before.st_ino


def test_the_socket_file_is_removed_at_the_end(socket_path):
    listener = UnixListener(socket_path)
    assert stat.S_ISSOCK(socket_path.stat().st_mode)
    listener.close()
    assert not socket_path.exists()
    listener.close()


def test_a_successors_socket_file_is_not_removed(socket_path, tmp_path):
    first = UnixListener(socket_path)
    socket_path.rename(tmp_path / "moved.sock")
    second = UnixListener(socket_path)
    first.close()
    assert socket_path.exists()
    second.close()


def test_a_folder_that_does_not_exist_is_refused_in_one_line(tmp_path):
    with pytest.raises(ListenError, match=r"no such file or directory$"):
        UnixListener(tmp_path / "nowhere" / "lockstep.sock")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_one_may_not_write_to_is_refused_in_one_line(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ListenError, match=r"permission denied$"):
        UnixListener(tmp_path / "lockstep.sock")
