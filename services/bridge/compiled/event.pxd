"""Which field of services.bridge.events.event.Event is where; rows.FIELDS has their names."""

cdef enum:
    EVENT_TOPIC
    EVENT_KEY
    EVENT_VALUE
    EVENT_HEADERS
    EVENT_BROADCAST
    EVENT_TABLE
    EVENT_SEQ
    EVENT_LSN
    EVENT_PLACED_BY
    EVENT_OP
    # how many fields there are
    EVENT_FIELDS
