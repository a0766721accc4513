"""A TCP proxy that tests cut in the middle of a transfer."""

import contextlib
import socket
import threading


class Proxy:
  """Forwards connections to one port and ends them when it is told to.

  Attributes:
    address: where it listens.
    upstream_bytes: bytes that it has taken from the callers so far.
    cuts: numbers of upstream bytes after which all connections are ended.
  """

  def __init__(self, target, cuts=()):
    self.upstream_bytes = 0
    self.cuts = list(cuts)
    self._target = target
    self._sockets = []
    self._lock = threading.Lock()
    self._listener = socket.create_server(('127.0.0.1', 0))
    self.address = f'127.0.0.1:{self._listener.getsockname()[1]}'
    threading.Thread(target=self._accept, daemon=True).start()

  def cut(self):
    """Ends every connection; new ones are taken."""
    with self._lock:
      for one in self._sockets:
        with contextlib.suppress(OSError):
          one.shutdown(socket.SHUT_RDWR)
      self._sockets.clear()

  def close(self):
    with contextlib.suppress(OSError):
      self._listener.shutdown(socket.SHUT_RDWR)
    self._listener.close()
    self.cut()

  def _accept(self):
    host, _, port = self._target.rpartition(':')
    with contextlib.suppress(OSError):
      while True:
        near, _ = self._listener.accept()
        far = socket.create_connection((host, int(port)))
        with self._lock:
          self._sockets += [near, far]
        for pair, count in (((near, far), True), ((far, near), False)):
          threading.Thread(
            target=self._forward, args=(*pair, count), daemon=True
          ).start()

  def _forward(self, source, sink, count):
    with source, contextlib.suppress(OSError):
      while data := source.recv(65536):
        sink.sendall(data)
        if count and self._is_cut_due(len(data)):
          self.cut()
    with contextlib.suppress(OSError):
      sink.shutdown(socket.SHUT_RDWR)

  def _is_cut_due(self, size):
    with self._lock:
      self.upstream_bytes += size
      if not self.cuts or self.upstream_bytes < self.cuts[0]:
        return False
      self.cuts.pop(0)
      return True


@contextlib.contextmanager
def through(target, cuts=()):
  """Runs a proxy to `target`."""
  proxy = Proxy(target, cuts)
  try:
    yield proxy
  finally:
    proxy.close()
