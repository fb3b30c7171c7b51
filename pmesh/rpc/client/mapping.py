"""`mesh.rpc.map`: items as calls on several ranks."""

import queue

from pmesh.errors import RankLost, TooManyCalls
from pmesh.ids import TrainerId
from pmesh.rpc.client.carrier import TICK_S
from pmesh.rpc.client.endpoint import Call, Endpoint
from pmesh.rpc.rules.deal import Deal, Dealt


class Map:
    """One `map` under way."""

    def __init__(
        self,
        endpoint: Endpoint,
        function: str,
        items: list[object],
        ranks: list[TrainerId],
        timeout_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._function = function
        self._items = items
        self._timeout_s = timeout_s
        self._deal = Deal(len(items), ranks)
        self._results: list[object] = [None] * len(items)
        self._ended = queue.SimpleQueue[tuple[Dealt, Call]]()
        self._calls: dict[Dealt, Call] = {}

    def run(self) -> list[object]:
        """Return the results. Raises as `Rpc.map`."""
        try:
            while not self._deal.is_done:
                for dealt in self._deal.deal():
                    self._start(dealt)
                self._take()
        finally:
            for call in self._calls.values():
                call.give_up("another call of the same map has failed")
        return self._results

    def _start(self, dealt: Dealt) -> None:
        argument = (self._items[dealt.item],)
        try:
            call = self._endpoint.begin(dealt.rank, self._function, argument, {}, self._timeout_s)
        except RankLost as e:
            self._lose(dealt.rank, e)
            return
        self._calls[dealt] = call
        call.future.add_done_callback(lambda _: self._ended.put((dealt, call)))

    def _take(self) -> None:
        """Wait for the end of a call; if all ranks are full of others' calls, for a moment."""
        try:
            dealt, call = self._ended.get(timeout=None if self._calls else TICK_S)
        except queue.Empty:
            self._deal.retry()
            return
        if self._calls.pop(dealt, None) is None:
            return
        try:
            result = call.result()
        except RankLost as e:
            self._lose(dealt.rank, e)
        except TooManyCalls:
            self._deal.refused(*dealt)
        else:
            if self._deal.done(*dealt):
                self._results[dealt.item] = result

    def _lose(self, rank: TrainerId, why: RankLost) -> None:
        self._deal.lose(rank)
        if not self._deal.ranks:
            raise why
