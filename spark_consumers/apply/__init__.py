"""A small epoch of a current-state table, applied in the driver: pure functions and a thin writer.

    events      a record of Kafka -> an event
    values      JSON forms -> Arrow, by the column's type
    changes     events -> at most one change for each row
    data_file   rows -> a Parquet file, and its description with statistics
    merging     which small files go into the new one
    apply       events and the places of their rows -> files, all that one commit needs
    look        a table as its catalog has it
    writer      looks tables up, writes the files, prepares the commits, by TableFiles.java

All but the writer are pure. What they do not do, or find strange, is Unsuited: Spark does it, or
refuses it. epochs/choice says which way a table's part of an epoch goes, and why.
"""
