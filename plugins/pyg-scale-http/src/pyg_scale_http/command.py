"""Predict for nodes of a graph directory, over HTTP.

MODEL is a Python file of yours and the name in it of a model, or of a function without arguments
that returns one, such as model.py:make. It is run: give no file that you do not trust. Weights are
a state_dict that torch.save wrote, read with weights_only=True. The server answers at /predict, has
a page at / to try it, /health and /metrics, and ends on SIGTERM when requests under way are
answered. Exit status: 0 if all went well, 1 if not, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import uvicorn

_EXPECTED = (ValueError, TypeError, OSError, NotImplementedError, ImportError, AttributeError)


def main(argv: Sequence[str]) -> int:
    """Run ``pyg-scale predict``."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        host, port = _address(args.http)
        num_neighbors = [int(k) for k in args.num_neighbors.split(",")]
    except ValueError as error:
        parser.error(str(error))
    try:
        return _serve(args, host, port, num_neighbors)
    except _EXPECTED as error:
        print(f"pyg-scale predict: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyg-scale predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL.py:NAME", help="a model, or a function that makes one"
    )
    parser.add_argument("directory", metavar="GRAPH", help="a graph directory")
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        nargs="?",
        const="127.0.0.1:8000",
        required=True,
        help="where to listen (default: 127.0.0.1:8000); port 0 is any free port, and is printed",
    )
    parser.add_argument("--weights", metavar="FILE", help="the state_dict of the model")
    parser.add_argument(
        "--forward",
        metavar="FILE.py:NAME",
        help="a function of the model and a batch, for models that are not called as PyG's are",
    )
    parser.add_argument(
        "--num-neighbors",
        metavar="K,K",
        default="15,10",
        help="neighbours per node and hop, -1 for all (default: 15,10)",
    )
    parser.add_argument("--input-type", metavar="TYPE", help="node type, in a graph with types")
    parser.add_argument("--time-attr", metavar="NAME", help="the attribute that holds times")
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="of the draws (default: 0)"
    )
    parser.add_argument(
        "--attributes", metavar="NAME,NAME", help="what the model reads, such as x (default: all)"
    )
    parser.add_argument("--feature-store", metavar="NAME", help="as in loaders, such as disk")
    parser.add_argument("--max-batch", metavar="N", type=int, default=64, help="(default: 64)")
    parser.add_argument(
        "--max-delay",
        metavar="SECONDS",
        type=float,
        default=0.0,
        help="how long a request waits for others to share its batch (default: 0)",
    )
    parser.add_argument(
        "--max-waiting",
        metavar="N",
        type=int,
        default=4096,
        help="nodes that may wait (default: 4096)",
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=30.0, help="(default: 30)"
    )
    parser.add_argument("--workers", metavar="N", type=int, default=1, help="(default: 1)")
    parser.add_argument(
        "--follow",
        metavar="SECONDS",
        type=float,
        help="look for new snapshots of the graph so often (default: never)",
    )
    parser.add_argument(
        "--max-body",
        metavar="BYTES",
        type=int,
        default=1 << 20,
        help="of a request (default: 1 MiB)",
    )
    parser.add_argument(
        "--max-connections", metavar="N", type=int, default=512, help="at a time (default: 512)"
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="the file of the token that requests must bring, readable by you only",
    )
    return parser


def _address(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:]+)\]|([^:]*)):(\d{1,5})", text)
    if found is None or int(found[3]) > 65535:
        raise ValueError(f"--http must be HOST:PORT, such as 127.0.0.1:8000 (got {text!r})")
    return found[1] or found[2] or "127.0.0.1", int(found[3])


def _serve(args: argparse.Namespace, host: str, port: int, num_neighbors: list[int]) -> int:
    import uvicorn

    from pyg_scale.comm.secret import read_secret
    from pyg_scale.serving import Predictor
    from pyg_scale_http.app import Service
    from pyg_scale_http.connection import PunctualProtocol

    token = None if args.token_file is None else read_secret(args.token_file)
    if token is None and host not in ("127.0.0.1", "::1", "localhost"):
        print(
            f"warning: {host} can be reached by others, and no token is asked for (--token-file)",
            file=sys.stderr,
        )
    model = load_model(args.model, args.weights)
    predictor = Predictor(
        model,
        args.directory,
        num_neighbors,
        input_type=args.input_type,
        forward=load_forward(args.forward),
        time_attr=args.time_attr,
        seed=args.seed,
        attributes=None if args.attributes is None else args.attributes.split(","),
        feature_store=args.feature_store,
        max_batch=args.max_batch,
        max_delay=args.max_delay,
        max_waiting=args.max_waiting,
        timeout=args.timeout,
        workers=args.workers,
        follow=False if args.follow is None else args.follow,
    )
    with predictor:
        predictor.warm_up()
        # A full collection looks at all that was imported, and takes as long as many requests.
        gc.collect()
        gc.freeze()
        config = uvicorn.Config(
            Service(predictor, token, args.max_body).app(),
            host=host,
            port=port,
            http=PunctualProtocol,
            log_level="warning",
            limit_concurrency=args.max_connections,
            timeout_graceful_shutdown=int(args.timeout) + 1,
            lifespan="on",
        )
        with bound(config) as listener:
            listener.listen(config.backlog)  # whoever reads the line below may connect at once
            shown = f"[{host}]" if ":" in host else host
            print(f"predicting at http://{shown}:{listener.getsockname()[1]}/", flush=True)
            with _ended_by_signals():
                uvicorn.Server(config).run(sockets=[listener])
        stats = predictor.stats()
    print(f"answered {stats['requests']:,} requests for {stats['nodes']:,} nodes", flush=True)
    return 0


def bound(config: uvicorn.Config) -> socket.socket:
    """The socket of a server, over whose connections small answers leave at once.

    An answer is two small writes. asyncio sends the second one without waiting for the client, as
    ``TCP_NODELAY`` says, only on sockets that know their protocol; uvicorn's do not, and the second
    one waited 40 ms.
    """
    listener = config.bind_socket()
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    return listener


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A context after which signals that uvicorn has taken as its end do not end the process."""
    if threading.current_thread() is not threading.main_thread():
        yield  # uvicorn takes none there
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def load_model(target: str, weights: str | None) -> Any:
    """The model that ``MODEL.py:NAME`` names, with weights if there are some.

    Args:
        target: A file and a name in it.
        weights: A file with a ``state_dict``.

    Raises:
        ValueError: If there is no such name, or it is no model; likewise ``OSError``.
    """
    import torch

    made = _named(target)
    model = made if isinstance(made, torch.nn.Module) else made() if callable(made) else made
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{target} is a {type(model).__name__}, and no torch.nn.Module")
    if weights is not None:
        state = torch.load(weights, map_location="cpu", weights_only=True)
        model.load_state_dict(state)
    return model


def load_forward(target: str | None) -> Any:
    """The function ``FILE.py:NAME`` that calls a model with a batch; ``None`` for the usual call.

    Raises:
        ValueError: If there is no such name; likewise ``TypeError``, ``OSError``.
    """
    if target is None:
        return None
    found = _named(target)
    if not callable(found):
        raise TypeError(f"{target} is a {type(found).__name__}, and no function")
    return found


def _named(target: str) -> Any:
    """The value that ``FILE.py:NAME`` names; the file runs once, and may import files beside it."""
    file, _, name = target.rpartition(":")
    if not file or not name:
        raise ValueError(f"a model or a function must be given as FILE.py:NAME (got {target!r})")
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    module = sys.modules.get(path.stem)
    if getattr(module, "__file__", None) != str(path.resolve()):
        spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
        if spec is None or spec.loader is None:
            raise ValueError(f"{file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        if (folder := str(path.resolve().parent)) not in sys.path:
            sys.path.append(folder)  # last: a file there hides no module of that name
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[path.stem]
            raise
    if not hasattr(module, name):
        raise ValueError(f"{file} has no {name!r}")
    return getattr(module, name)
