"""The rules' numbers: one frozen value, with defaults that need no tuning.

`config.py` fills it from the configuration file; every field is a key of `[policy]` (or of a table below it).
Estimator constants that no operator should touch live beside the estimator in `runway.py`.
"""

from __future__ import annotations

from msgspec import Struct


class FeedPolicy(Struct, frozen=True, omit_defaults=True):
    """What is known of one UPS that feeds the node, beyond what it says itself."""

    name: str  # "ups@host:port", the feed's identity everywhere
    battery_installed: str = ""  # ISO date the battery was put in; "" = unknown
    age_y: float | None = None  # derived from battery_installed at start; None = unknown
    chemistry: str = ""  # "vrla" or "lfp"; "" = as reported, else vrla
    rated: tuple[tuple[float, float], ...] = ()  # (load_pct, runtime_s) points of the vendor's table
    learned_phi: float | None = None  # own learned capacity, 1.0 = as rated; from the discharge record
    proven_phi: float | None = None  # share that a discharge used and survived: a lower bound, from the same record


class Policy(Struct, frozen=True, omit_defaults=True):
    """Everything that `decide` may weigh. Seconds unless the suffix says otherwise."""

    feeds: tuple[FeedPolicy, ...] = ()
    min_supplies: int = 1  # feeds that must be on mains for the node to be on line

    # riding through
    on_battery: str = "ride"  # "ride": train on battery while it lasts; "park": stop after the debounce
    confirm_s: float = 0.0  # on battery this long before an event is announced (0 = at once; it only saves early)
    resume_after_s: float = 10.0  # mains must be back this long before ranks resume (3 polls and a flap)
    poll_online_s: float = 5.0  # between looks at the UPS on line power (its status; everything every 5 s)
    poll_battery_s: float = 2.0  # between looks at it on battery

    # save early, train on
    snapshot: str = "auto"  # "auto": when it pays; "always": in every outage; "never"
    snapshot_after_s: float = 10.0  # on battery this long before the first snapshot; 47 % of outages are over by then
    snapshot_again_s: float = 600.0  # work at risk worth a second snapshot in one outage; six flushes at least
    loss_weight_s: float = 45000.0  # what a lost run costs, in seconds of training (12.5 h)
    outages: tuple[float, ...] = ()  # how long they last here, by `outages.COMPONENTS`; learned, () = the default prior

    # stop late
    margin_s: float = 10.0  # kept on top of the need
    flush_factor: float = 1.25  # a measured save times this is what is planned
    flush_load: float = 1.0  # load of the UPS while ranks flush, to that while they train; a drill measures it
    flush_default_s: float = 60.0  # planned for a job that has measured nothing yet
    flush_max_s: float = 600.0  # with mains back, a flush that takes longer is given up
    prepare_max_s: float = 2.0  # a rank that hasn't promised by then is promised for, from its shared page
    hold_max_s: float = 15.0  # a rank that promised waits at most this long for the decision
    seal_max_s: float = 10.0  # a seal asked for and not written is asked of another rank

    # halt
    halt_s: float = 45.0  # from the halt order to power no longer needed
    exit_wait_s: float = 10.0  # ranks have this long to quiesce, then to leave
    park_max_s: float = 900.0  # parked on battery at most this long (60 s where no battery voltage is known)

    # trust
    blind_save_s: float = 45.0  # on battery and no fresh value for this long: stop
    blind_halt_s: float = 20.0  # parked and no fresh value for this long: halt
    lb_polls: int = 2  # LB must hold this many polls
    lb_halt_s: float = 4.0  # LB held this long while parked: halt
    cal_max_s: float = 1800.0  # CAL or TEST excuses OB and LB at most this long
    off_s: float = 30.0  # OFF this long: the feed counts as absent (NUT's OFFDURATION)
    fsd_s: float = 15.0  # left after a new FSD (NUT's HOSTSYNC)

    # drills only
    time_scale: float = 1.0  # every time constant of the runway estimator times this; a UPS of 40 s wants 0.1
