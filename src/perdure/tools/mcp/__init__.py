"""Tools of MCP servers, as an extension (rules H118 and H380 to H396). Extra ``mcp``.

``server`` has the object that a host opens, and ``keeper`` what keeps a connection for it; ``connection`` is one of
these, over ``stdio`` (with a ``process``) or ``http``. ``mirror`` makes tools of what a server lists, ``checking``
checks arguments and results once ``weighing`` has said that it is not too much work, ``content`` reads answers,
``calls`` says what becomes of a call whose connection is lost. Only ``server``, ``keeper``, ``losses``, ``process`` and
``settings`` may be imported where the extra is not installed.
"""
