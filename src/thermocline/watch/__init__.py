"""Live page of a run: `thermocline watch RUN`. Reads what a run writes; imports no torch."""

from thermocline.watch.server import WatchServer as WatchServer
