"""The tests that `make test` leaves to `make test-long`, which would make it too long.

    with `[`     some cases of a test: another case stays in `make test`
    without      whole tests: docs/EVIDENCE.md names each, with what `make test` shows in its place

LONG_ON_THE_OLDEST has files whose cases on the oldest supported PostgreSQL are left out.

Some of the cases carry a claim of their own as well, such as a kind of table or a format: those are
in docs/EVIDENCE.md, too.
"""

from typing import Final

_BRIDGE: Final = "tests/bridge/"
_FAULTS: Final = f"{_BRIDGE}faults/"
_FAILOVER: Final = "tests/failover/"
_TABLES: Final = "tests/spark_consumers/"
_PREPARED: Final = (
    f"{_FAULTS}test_hanging_prepared.py::"
    "test_each_step_of_a_prepared_transaction_is_ended_as_it_was_decided"
)
_BEHIND: Final = (
    f"{_FAULTS}test_hanging_prepared.py::"
    "test_abort_of_a_later_transaction_keeps_hanging_staged_records"
)
_SETTLING: Final = f"{_FAULTS}test_interrupted_settling.py::"
_ROUNDS: Final = f"{_BRIDGE}evidence/test_rounds.py::"
_HANGING: Final = f"{_FAULTS}test_hanging.py::test_hanging_transaction_is_ended_as_kafka_decided"
_GONE: Final = f"{_FAULTS}test_broker.py::test_the_network_is_gone_for_longer_than_the_time_out"
_BACK: Final = f"{_FAULTS}test_network_postgres.py::test_the_bridge_comes_back"
_REPAIR: Final = f"{_BRIDGE}test_snapshot_modes.py::test_killed_at_each_step_of_the_repair"
_RECOVER: Final = f"{_BRIDGE}test_recover.py::test_killed_and_run_again"
_CHANGES: Final = (
    f"{_BRIDGE}test_recover_limits.py::test_a_table_that_changes_while_the_slot_is_made"
)
_NAMES: Final = f"{_FAULTS}test_hanging_topics.py::test_topics_of_any_name_lose_and_repeat_nothing"
_SIGNAL: Final = f"{_BRIDGE}test_signal_topic.py::test_killed_at_each_seam_of_a_signal"
_PAUSED: Final = (
    f"{_TABLES}test_writers.py::test_a_writer_that_was_paused_and_overtaken_writes_nothing"
)
_UPKEEP: Final = f"{_TABLES}test_index_upkeep.py::test_maintenance_and_a_restart_leave_the_index"
_PARKED: Final = f"{_TABLES}test_parked.py::"
_RETURNS: Final = (
    f"{_PARKED}test_the_others_go_on_and_a_parked_table_comes_back_with_all_that_it_lacks"
)
_PARKED_KILLED: Final = f"{_PARKED}test_a_kill_while_a_table_is_parked_or_returns_changes_nothing"
_CANCELLED: Final = f"{_TABLES}test_cancelled_rebuilds.py::"
_IN_THE_MIDDLE: Final = (
    f"{_CANCELLED}test_it_is_cancelled_in_the_middle_of_a_part_or_of_the_last_epoch"
)
_STAYS: Final = f"{_CANCELLED}test_a_parked_table_stays_parked_when_its_rebuild_is_cancelled"
_REBUILDS: Final = f"{_TABLES}test_rebuilds.py::"
_WHOLE: Final = f"{_REBUILDS}test_the_others_go_on_and_readers_have_the_old_table_until_it_is_whole"
_FORMER: Final = f"{_REBUILDS}test_rows_of_a_former_source_table_do_not_come_again"
_NO_FILL: Final = f"{_REBUILDS}test_a_rebuild_that_kafka_can_not_fill_ends_and_leaves_the_table"
_ROLLED: Final = f"{_TABLES}test_rolled_back.py::"
_UNTIL_WHOLE: Final = f"{_ROLLED}test_a_table_that_was_rolled_back_is_parked_until_it_is_whole"
_ROLLED_SUMS: Final = f"{_ROLLED}test_sums_that_were_rolled_back_are_told_and_computed_anew"
_SUMS: Final = f"{_TABLES}test_sums.py::test_sums_with_other_settings_are_computed_anew"
_LEFT_OUT: Final = (
    f"{_TABLES}test_bad_events.py::"
    "test_after_an_event_was_left_out_an_insert_replaces_the_row_of_its_key"
)
_LOOKS: Final = (
    f"{_TABLES}test_current.py::test_a_users_text_that_looks_like_the_placeholder_is_stored"
)
_UNREAD: Final = (
    f"{_TABLES}test_formats.py::test_records_that_can_not_be_read_are_named_and_put_aside"
)
_FILL_KILLED: Final = f"{_TABLES}test_fills.py::test_a_kill_on_the_way"
_MAINTAINED: Final = (
    f"{_TABLES}test_operations.py::test_a_kill_and_then_maintenance_bring_no_row_twice"
)
_REST: Final = f"{_TABLES}test_catalogs.py::"
_FILLS: Final = f"{_TABLES}test_fills.py::"
_SNAPSHOTS: Final = f"{_BRIDGE}test_snapshot_standbys.py::"
_LARGE: Final = f"{_TABLES}test_large_tables.py::"
LONG: Final = (
    f"{_BRIDGE}test_schema_registry.py::test_a_registry_that_lost_its_schemas",
    "tests/torture/test_short_run.py::test_nothing_is_lost_over_tls_on_the_oldest_postgresql",
    "tests/torture/test_short_run.py::test_nothing_is_lost_while_commits_wait_and_in_tables",
    f"{_PREPARED}[COMMIT PREPARED-all but",
    f"{_PREPARED}[COMMIT PREPARED-no marker",
    f"{_PREPARED}[PREPARE-all but",
    f"{_PREPARED}[PREPARE-no marker, the slot was told",
    f"{_PREPARED}[PREPARE-only the record",
    f"{_PREPARED}[ROLLBACK PREPARED-all but",
    f"{_PREPARED}[ROLLBACK PREPARED-no marker, the slot knows",
    f"{_PREPARED}[ROLLBACK PREPARED-only the record",
    f"{_SETTLING}test_a_transaction_that_publishes_again_may_hang_too",
    f"{_SETTLING}test_aborted_events_are_published_again[nothing is visible",
    f"{_SETTLING}test_aborted_events_are_published_again[noted twice",
    f"{_SETTLING}test_aborted_events_are_published_again[only the record",
    f"{_HANGING}[no marker, the slot was told]",
    f"{_HANGING}[only END",
    f"{_NAMES}[{{prefix}}-{{table}}-messages-{{type}}-False",
    f"{_NAMES}[cdc-",
    f"{_FAULTS}test_cluster.py::test_brokers_come_and_go_and_nothing_is_lost_or_comes_twice[disk]",
    f"{_GONE}[stalled]",
    f"{_GONE}[half-open at the broker]",
    f"{_GONE}[answers stalled]",
    f"{_BACK}[half-open at the bridge]",
    f"{_BACK}[stalled",
    f"{_FAULTS}test_broker.py::test_the_broker_is_gone_and_comes_again[stopped]",
    f"{_ROUNDS}test_a_server_that_was_restored_to_a_point_in_time[snapshot",
    f"{_ROUNDS}test_a_volume_that_is_set_back[True]",
    f"{_ROUNDS}test_a_volume_that_is_set_back_",
    f"{_ROUNDS}test_two_promotions_to_the_same_timeline_that_its_history_alone_tells",
    f"{_ROUNDS}test_another_publication[_made_again_while_it_runs]",
    f"{_BRIDGE}test_large_rows.py::test_a_row_too_large_for_kafka_is_a_dead_letter[100]",
    f"{_BRIDGE}test_large_rows.py::test_a_row_with_a_large_value_refers_to_where_it_is_stored[100]",
    f"{_BRIDGE}test_snapshot_published_bugs.py::"
    "test_a_table_in_the_middle_of_its_rows_is_dropped_renamed_emptied_or_altered[while it is stop",
    f"{_BRIDGE}test_snapshot.py::test_changed_all_the_time_and_killed_at_random_moments",
    f"{_BRIDGE}test_snapshot_without_key.py::"
    "test_inserted_all_the_time_and_killed_at_random_moments",
    f"{_BRIDGE}test_snapshot_standbys.py::test_a_failover_in_the_middle_of_a_snapshot[on_request]",
    f"{_BRIDGE}test_streaming.py::test_killed_at_random_moments_under_load_nothing_is_lost_or",
    f"{_BRIDGE}test_jdbc_sink.py::"
    "test_tables_stay_equal_through_changes_and_a_kill[json_schema_envelope]",
    f"{_BRIDGE}test_iceberg_sink.py::"
    "test_each_event_is_appended_once_through_changes_and_kills[flat rows in Avro]",
    f"{_REPAIR}[recover dropping]",
    f"{_REPAIR}[recover slot made]",
    f"{_REPAIR}[recover committed]",
    f"{_REPAIR}[recover fenced]",
    f"{_RECOVER}[recover slot made]",
    f"{_RECOVER}[recover dropping]",
    f"{_RECOVER}[recover fenced]",
    f"{_RECOVER}[recover committed]",
    f"{_SIGNAL}[before kafka commit]",
    f"{_SIGNAL}[signal marked]",
    f"{_TABLES}test_drill.py::",
    f"{_TABLES}test_rebuilds.py::test_a_kill_anywhere_leaves_the_old_table_or_the_new_one[all]",
    f"{_TABLES}test_indexed_delete.py::test_index_stays_true_through_any_cut_kill_or_compaction[1]",
    f"{_TABLES}test_snapshot_rows.py::test_tables_equal_the_source_after_a_snapshot_under_load[his",
    f"{_PAUSED}[Staging-begin-2]",
    f"{_PAUSED}[Staging-adopt-1]",
    f"{_FAULTS}test_hanging.py::test_abort_of_the_next_transaction_keeps_the_hanging_one",
    f"{_FAULTS}test_hanging.py::test_visible_events_prove_a_commit_behind_any_number_of_aborted_",
    f"{_FAULTS}test_hanging.py::test_a_bridge_with_another_database_decides_nothing",
    f"{_FAULTS}test_hanging.py::test_partitions_with_a_new_leader_epoch_are_looked_at",
    f"{_SETTLING}test_aborted_events_are_published_again[killed again, while it is repeated]",
    f"{_PREPARED}[COMMIT PREPARED-only the record",
    f"{_PREPARED}[ROLLBACK PREPARED-no marker, the slot was told",
    f"{_FAULTS}test_hanging_topics.py::"
    "test_hanging_transaction_behind_another_producers_is_ended_after_it",
    f"{_FAULTS}test_broker.py::test_kafka_is_far_away_when_the_bridge_starts",
    f"{_FAULTS}test_broker.py::test_a_slow_broker_costs_no_session",
    f"{_FAULTS}test_process.py::test_stopped_for_longer_than_every_time_out_alone",
    f"{_BRIDGE}test_fenced_server.py::"
    "test_a_snapshot_writes_nothing_behind_a_fence_and_goes_on_after_it",
    f"{_BRIDGE}test_signal_topic.py::test_paused_resumed_and_stopped",
    f"{_BRIDGE}test_signal_topic.py::test_a_failover_in_the_middle_of_what_was_asked",
    f"{_BRIDGE}test_snapshot_without_key.py::test_a_failover_in_the_middle",
    f"{_TABLES}test_snapshot_rows.py::"
    "test_a_row_that_says_what_holds_begins_no_version[an epoch each]",
    f"{_TABLES}test_job.py::"
    "test_meetings_with_another_writer_end_it_only_when_nothing_comes_between",
    f"{_TABLES}test_index_upkeep.py::test_an_index_is_bounded_by_its_table",
    f"{_TABLES}test_formats.py::test_all_types_and_changes_are_in_the_tables[json_schema",
    f"{_BRIDGE}adoption/test_adopt_formats.py::"
    "test_topics_with_schemas_are_continued_key_by_key[mixed]",
    f"{_BRIDGE}test_snapshot_many_tables.py::"
    "test_small_tables_share_chunks_under_constant_change_killed_at_each_seam[primary]",
    f"{_TABLES}test_checkpoint.py::test_an_epoch_that_was_begun_is_made_again_of_many_small_batches",
    f"{_TABLES}test_cluster_audit.py::",
    "tests/torture/test_snapshot_goal.py::test_a_few_kills_and_a_failover_within_snapshots",
    f"{_TABLES}test_formats.py::test_all_types_and_changes_are_in_the_tables[protobuf",
    f"{_PAUSED}[Ledger-prepare-2]",
    f"{_WHOLE}[history",
    f"{_TABLES}test_quiet_tables.py::"
    "test_quiet_tables_go_on_after_kafka_has_deleted_what_brought_them_nothing[True]",
    f"{_TABLES}test_health.py::"
    "test_steps_of_many_tables_that_neither_spark_nor_python_works_on_keep_it_healthy",
    f"{_RETURNS}[False-value]",
    f"{_RETURNS}[False-record]",
    f"{_RETURNS}[True-record]",
    f"{_RETURNS}[True-dead letter]",
    f"{_PARKED_KILLED}[False-nothing]",
    f"{_PARKED_KILLED}[False-tables]",
    f"{_PARKED_KILLED}[True-nothing]",
    f"{_PARKED_KILLED}[True-all]",
    f"{_WHOLE}[current-True]",
    f"{_WHOLE}[changelog",
    f"{_NO_FILL}[stop",
    f"{_UNTIL_WHOLE}[rebuild-False]",
    f"{_UNTIL_WHOLE}[roll forward-True]",
    f"{_SUMS}[the columns-nothing]",
    f"{_SUMS}[the source-an epoch]",
    f"{_LOOKS}[X19",
    f"{_LOOKS}[not",
    f"{_UNREAD}[json_schema",
    f"{_FILL_KILLED}[fills",
    f"{_FILL_KILLED}[current",
    f"{_LARGE}test_unchanged_values_and_truncates[scan]",
    f"{_LARGE}test_rows_change_places_in_one_step[scan]",
    f"{_LARGE}test_a_large_table_stays_large[scan]",
    f"{_LARGE}test_rows_of_a_snapshot_and_inserts_of_them[scan]",
    f"{_TABLES}test_evolution.py::test_a_table_that_is_made_anew_under_its_name[changelog]",
    f"{_PAUSED}[Stage-write-2]",
    f"{_FAILOVER}check/test_standby.py::test_the_standby_is_paused_and_lags",
    f"{_FAILOVER}check/test_servers.py::test_standby_of_a_standby",
    f"{_FAILOVER}test_rejoin_safety.py::test_a_rejoin_has_a_deadline_of_its_own_and_service_names_work",
    f"{_FAILOVER}test_lists.py::test_an_unused_slot_in_the_standbys_list_keeps_nobody_waiting",
    f"{_CANCELLED}test_a_cancelled_rebuild_leaves_the_table_as_it_is[2]",
    f"{_REBUILDS}test_a_reader_in_a_loop_sees_the_old_table_or_the_new_one",
    f"{_REBUILDS}test_a_column_that_comes_meanwhile",
    f"{_REBUILDS}test_a_second_rebuild_is_refused_until_the_first_is_done",
    f"{_REBUILDS}test_a_rebuild_whose_table_has_another_shape_since_begins_anew",
    f"{_REBUILDS}test_a_transaction_larger_than_a_part_is_not_split",
    f"{_REBUILDS}test_events_that_were_published_again_later_are_not_left_out",
    f"{_UNTIL_WHOLE}[roll forward-False]",
    f"{_ROLLED}test_sums_whose_metadata_was_put_back_are_computed_anew",
    f"{_ROLLED}test_sums_are_not_computed_from_the_rows_of_a_table_that_was_rolled_back",
    f"{_ROLLED}test_a_run_on_an_idle_source_tells_of_rollbacks_when_it_maintains_the_tables",
    f"{_REST}test_a_rest_catalog_without_transactions_gets_one_table_after_the_other[404]",
    f"{_REST}test_a_rest_catalog_without_transactions_gets_one_table_after_the_other[405]",
    f"{_FILLS}test_a_transaction_that_adds_the_column_and_a_rebuild",
    f"{_FILLS}test_versions_of_a_history_get_it_where_the_epoch_truncates",
    f"{_TABLES}test_defaults.py::test_defaults_of_every_type_are_in_the_tables",
    f"{_TABLES}test_swapped_columns.py::",
    f"{_TABLES}test_snapshot_rows.py::test_rows_of_tables_without_a_key_are_inserts",
    f"{_UNREAD}[protobuf]",
    f"{_TABLES}test_operations.py::test_sums_are_kept_by_changes_with_what_is_gone_taken_off",
    f"{_RETURNS}[False-dead letter]",
    f"{_PARKED_KILLED}[True-tables]",
    f"{_SUMS}[the columns-an epoch]",
    f"{_TABLES}test_rules.py::test_another_rule_is_refused_and_nothing_written[False",
    f"{_TABLES}test_publication.py::"
    "test_readers_that_ask_once_see_all_tables_at_one_epoch[at once]",
    f"{_TABLES}test_current.py::test_rows_of_a_snapshot_give_way_to_later_changes[an epoch each]",
    f"{_SNAPSHOTS}test_commits_wait_for_the_bridge_while_it_reads[remote_write]",
    f"{_BRIDGE}test_dead_letters.py::test_a_topic_that_must_not_be_written",
    f"{_BRIDGE}test_snapshot_requests.py::test_killed_in_the_middle_of_what_was_asked",
    f"{_HANGING}[only the record",
    f"{_FAILOVER}test_rejoin.py::test_three_nodes_the_others_follow_and_the_best_is_chosen",
    "tests/local/test_kafka_cluster.py::test_one_broker_may_be_lost_with_its_disk_and_two_may_not",
    _FORMER,
    _ROLLED_SUMS,
    _STAYS,
    _IN_THE_MIDDLE,
    _BEHIND,
    f"{_SETTLING}test_a_note_that_is_left_over_does_no_harm",
    f"{_SETTLING}test_events_of_a_missing_topic_stop_the_bridge",
    f"{_SETTLING}test_a_transaction_that_ends_a_hanging_one_may_hang_too",
    f"{_BRIDGE}test_publication.py::test_whole_schemas_come_and_go_while_the_bridge_runs",
    f"{_BRIDGE}test_recover_limits.py::test_a_column_that_is_gone_makes_no_difference",
    f"{_BRIDGE}test_recover_upgrade.py::test_topics_go_on_after_an_upgrade[pg_dump]",
    f"{_BRIDGE}adoption/test_adopt_formats.py::"
    "test_topics_with_schemas_are_continued_key_by_key[schemas]",
    f"{_BRIDGE}evidence/test_recover_restore.py::test_a_volume_that_is_set_back[True]",
    f"{_BRIDGE}test_snapshot_modes.py::"
    "test_killed_in_the_middle_of_a_snapshot_that_always_begins_anew",
    f"{_BRIDGE}test_iceberg_sink.py::"
    "test_each_event_is_appended_once_through_changes_and_kills[events into",
    f"{_FAILOVER}test_mirrored.py::test_multi_alternate",
    f"{_FAILOVER}test_mirrored.py::test_ignored_slots",
    f"{_FAILOVER}test_rounds.py::test_a_round_leaves_one_primary_and_loses_nothing",
    f"{_FAILOVER}test_bridge_fenced.py::test_heartbeats_go_on_once_a_fence_is_taken_back",
    f"{_REBUILDS}test_a_parked_table_never_returns_without_the_rebuild_that_was_asked_for",
    f"{_PARKED}test_a_table_goes_on_without_dead_letters_once_an_operator_accepts_them",
    f"{_PARKED}test_a_dropped_table_that_is_refused_when_it_is_filled_returns_with_all_rows",
    f"{_PARKED}test_a_table_that_is_refused_again_stays_parked",
    f"{_PARKED}test_a_rebuild_of_a_table_with_dead_letters_waits_for_an_operator_to_accept_them",
    f"{_ROLLED}test_a_table_whose_metadata_was_put_back_is_parked_until_it_is_whole",
    f"{_ROLLED}test_a_table_that_was_rolled_back_stops_the_others_where_that_is_wanted",
    f"{_ROLLED}test_a_start_tells_of_the_rollback_and_a_rebuild_needs_no_transaction",
    f"{_ROLLED}test_a_compacted_table_goes_on_where_the_record_of_epochs_was_lost",
    f"{_TABLES}test_indexed_delete.py::test_what_the_index_does_not_cover_goes_the_way_without_it",
    f"{_TABLES}test_indexed_delete.py::test_a_second_writer_does_without_the_index",
    f"{_TABLES}test_indexed_delete.py::test_an_index_is_taken_again_by_the_next_run",
    f"{_TABLES}test_index_upkeep.py::test_epochs_that_only_append_are_followed",
    f"{_TABLES}test_index_maintenance.py::test_maintenance_of_another_process_leaves_rows_right",
    f"{_FILLS}test_rows_that_were_there_get_the_value[True]",
    f"{_FILLS}test_sums_of_a_column_count_what_rows_got",
    f"{_TABLES}test_operations.py::test_an_idle_table_is_made_anew_without_a_restart",
    f"{_TABLES}test_sums.py::test_sums_that_the_settings_left_out_for_a_while_are_computed_anew",
    f"{_TABLES}test_sums.py::test_an_update_with_which_a_table_returns_is_in_its_sums_once",
    f"{_TABLES}test_bad_events.py::"
    "test_an_event_at_the_place_and_lsn_of_another_one_is_put_aside_too",
    f"{_TABLES}test_bad_events.py::test_bad_events_are_put_aside_once_and_the_others_go_on[history",
    f"{_TABLES}test_evolution_limits.py::"
    "test_a_column_of_the_dropped_one_s_name_takes_its_place_in_the_same_commit",
    f"{_TABLES}test_defaults.py::test_what_the_wal_lacks_comes_with_a_snapshot",
    f"{_TABLES}test_current.py::"
    "test_an_epoch_that_some_tables_have_is_made_again_for_the_others[2]",
    f"{_TABLES}test_without_record.py::"
    "test_tables_are_not_whole_where_the_first_transaction_comes_behind_a_gap",
    f"{_TABLES}test_arrival.py::"
    "test_a_duplicate_does_not_stand_in_for_an_event_that_is_not_to_be_seen_yet[2]",
    f"{_TABLES}test_bad_events.py::"
    "test_an_epoch_that_is_cut_larger_after_a_kill_puts_all_its_bad_events_aside",
    f"{_REBUILDS}test_a_parked_table_stays_parked_until_its_rebuild_is_done",
    f"{_NO_FILL}[park-its beginning]",
    f"{_REBUILDS}test_a_rebuild_waits_for_an_epoch_that_is_to_be_made_again",
    f"{_REBUILDS}test_once_brings_a_rebuild_to_its_end",
    f"{_REBUILDS}test_a_rebuild_begins_anew_with_a_topic_that_was_made_anew",
    f"{_PARKED}test_a_table_left_out_for_an_epoch_returns_without_what_kafka_has_lost_and_says_so",
    f"{_PARKED}test_a_table_whose_key_has_changed_returns_with_rows_behind_a_truncate",
    f"{_PARKED}test_a_rebuild_or_a_drop_does_not_hide_the_events_that_kafka_lacks",
    f"{_PARKED}test_a_table_that_never_was_made_is_parked_and_made_later",
    f"{_ROLLED}test_sums_of_a_table_that_was_rolled_back_are_parked_with_it_though_nothing_comes",
    f"{_FILLS}test_a_parked_table_gets_it_under_the_column_s_later_name",
    f"{_FILLS}test_large_tables_too",
    f"{_FILLS}test_null_stops_a_fill_that_is_on_its_way",
    f"{_TABLES}test_indexed_delete.py::test_a_table_that_is_made_anew_has_another_key",
    f"{_TABLES}test_indexed_delete.py::test_an_index_that_is_lost_under_way_is_made_anew",
    _UPKEEP,
    f"{_TABLES}test_index_upkeep.py::test_a_table_that_was_refused_costs_nothing_more",
    f"{_TABLES}test_index_upkeep.py::test_an_index_that_a_kill_leaves_behind_its_table_follows",
    f"{_TABLES}test_restore.py::test_a_rule_by_the_new_name_of_a_column_fits_what_was_there_before",
    f"{_TABLES}test_evolution.py::test_a_table_that_is_made_anew_under_its_name[history]",
    f"{_TABLES}test_evolution_limits.py::"
    "test_a_column_is_dropped_in_the_commit_that_brings_the_epoch[kill]",
    f"{_TABLES}test_evolution_limits.py::"
    "test_a_column_that_iceberg_needs_is_not_dropped_and_parks_the_table[ADD",
    f"{_TABLES}test_job.py::"
    "test_a_small_topic_that_was_made_again_is_refused[divergence_topic-True]",
    f"{_LARGE}test_killed_between_its_commits[scan]",
    f"{_TABLES}test_without_record.py::test_tables_at_one_lsn_without_a_record_are_judged_all",
    f"{_TABLES}test_sums.py::"
    "test_sums_lose_the_rows_that_were_written_before_their_table_got_other_columns[one widened",
    f"{_REST}"
    "test_a_rest_catalog_that_may_have_committed_is_never_taken_for_one_without_transactions",
    f"{_TABLES}test_writers.py::test_a_table_that_an_epoch_brings_nothing_is_not_touched",
    f"{_TABLES}test_kinds.py::test_a_history_has_every_version[False]",
    f"{_TABLES}test_readers.py::test_pyiceberg_and_duckdb_read_the_rows_of_now_and_of_a_tag[False]",
    f"{_TABLES}test_rules.py::test_another_rule_is_refused_and_nothing_written[True-now1-kind]",
    f"{_TABLES}test_wait_page.py::test_a_start_on_an_idle_source_answers_and_ends[of other",
    f"{_TABLES}test_kafka_pause.py::test_a_request_is_repeated_with_patience_alone",
    f"{_TABLES}test_current.py::test_any_cut_leads_to_the_same_rows[1000",
    f"{_LOOKS}[[",
    f"{_BRIDGE}adoption/test_release.py::"
    "test_a_table_whose_snapshot_has_not_begun_keeps_it_from_being_given_back",
    f"{_ROUNDS}test_another_database_that_its_identifier_alone_tells",
    f"{_ROUNDS}test_another_publication[_made_again]",
    f"{_BRIDGE}evidence/test_locks.py::"
    "test_a_commit_that_waits_returns_only_when_kafka_has_it[remote_write]",
    f"{_GONE}[half-open at the bridge]",
    f"{_FAULTS}test_hanging.py::test_the_slot_proves_a_commit_while_commits_wait_for_the_bridge",
    f"{_FAULTS}test_hanging.py::test_visible_removal_of_a_staging_proves_its_commit",
    f"{_FAULTS}test_server.py::test_the_server_is_gone_and_comes_again[shut down",
    f"{_BRIDGE}test_claim_checks.py::"
    "test_a_kill_between_upload_and_commit_loses_and_repeats_nothing[claims stored]",
    f"{_BRIDGE}test_compiled.py::test_a_wheel_has_what_was_compiled",
    f"{_BRIDGE}test_dead_letters.py::test_records_too_large_for_a_topic[dead_letter]",
    f"{_BRIDGE}test_recover_limits.py::test_a_key_column_that_is_renamed",
    f"{_BRIDGE}test_recover_limits.py::test_a_snapshot_that_was_broken_off",
    _CHANGES,
    f"{_BRIDGE}test_recover.py::test_a_topic_that_is_lost[progress]",
    f"{_BRIDGE}test_snapshot_modes.py::test_a_stop_is_heard_in_the_middle_of_a_repair",
    f"{_BRIDGE}test_snapshot_without_key.py::test_killed_at_each_seam[chunk begun-3]",
    f"{_BRIDGE}test_snapshot_without_key.py::test_killed_at_each_seam[chunk handed-3]",
    f"{_BRIDGE}test_snapshot_without_key.py::test_killed_at_each_seam[chunk marked-3]",
    f"{_BRIDGE}test_snapshot_without_key.py::test_killed_at_each_seam[chunk read-3]",
    f"{_BRIDGE}test_snapshot_without_key.py::test_killed_at_each_seam[chunk secured-3]",
    f"{_BRIDGE}test_snapshot_without_key.py::"
    "test_a_table_that_is_rewritten_in_the_middle_is_not_read_on[ALTER",
    f"{_BRIDGE}test_snapshot_without_key.py::"
    "test_a_table_that_is_rewritten_in_the_middle_is_not_read_on[VACUUM",
    f"{_BRIDGE}test_witness_sequence.py::test_a_sequence_that_was_set_back[True]",
    f"{_BRIDGE}test_flat_live.py::"
    "test_rows_come_flat_once_each_and_readers_of_envelopes_refuse_them[tombstone]",
    f"{_BRIDGE}values/test_debezium_connect_times.py::"
    "test_schemas_and_values_are_those_of_debezium[json_schema_envelope]",
    f"{_BRIDGE}test_secrets.py::"
    "test_servers_that_do_not_answer_are_told_of_without_secrets[command2]",
    f"{_FAILOVER}test_proof.py::test_a_frozen_primary_is_not_replaced[True]",
    f"{_FAILOVER}test_signals.py::test_a_promotion_that_was_ordered_is_never_taken_back[15]",
    f"{_FAILOVER}test_signals.py::test_a_promotion_that_was_ordered_is_never_taken_back[1]",
    f"{_TABLES}test_audit.py::test_audits_under_load_and_planted_differences",
    "tests/torture/test_short_run.py::test_nothing_is_lost_or_repeated_under_faults",
    f"{_FILLS}test_every_version_of_a_history_gets_it_and_no_event_of_a_changelog",
    f"{_TABLES}test_without_record.py::test_tables_at_three_lsns_without_a_record_lack_nothing",
    f"{_TABLES}test_sums.py::"
    "test_sums_of_a_table_that_was_dropped_are_those_of_the_table_made_anew",
    f"{_TABLES}test_index_upkeep.py::test_a_full_disk_leads_to_the_way_without_the_index",
    f"{_TABLES}test_wait_page.py::test_a_start_does_not_claim_what_was_read_of_a_former_topic",
    _MAINTAINED,
    f"{_TABLES}test_operations.py::test_a_file_is_written_anew_only_when_much_of_it_is_deleted",
    f"{_TABLES}test_publication.py::"
    "test_a_table_that_was_dropped_meanwhile_leaves_all_others_where_they_are",
    _LEFT_OUT,
    f"{_TABLES}test_bad_events.py::test_a_table_made_anew_remembers_what_kafka_has_refused",
    f"{_TABLES}test_job.py::test_other_readers_refuse_a_small_topic_that_was_made_again",
    f"{_REBUILDS}test_a_parked_table_that_has_nothing_yet",
    f"{_REBUILDS}test_events_before_those_that_were_published_again_are_not_left_out",
    f"{_TABLES}test_evolution.py::test_a_column_whose_name_has_a_dot_comes_later",
    f"{_ROLLED}test_rows_of_somebody_else_on_top_do_not_hide_it",
    f"{_ROLLED}test_a_record_may_name_a_compaction",
    f"{_PARKED}test_the_remedy_of_a_table_without_a_key_that_is_updated",
    f"{_PARKED}test_dead_letters_of_a_parked_table_are_known_when_it_returns",
    f"{_BRIDGE}test_publication.py::test_a_signal_that_kafka_does_not_take_is_not_forgotten",
    f"{_FAULTS}test_hanging.py::test_a_transaction_that_hangs_at_the_stop_is_ended_first",
    f"{_BRIDGE}test_snapshot.py::test_streamed_and_prepared_transactions_beside_its_chunks",
    f"{_BRIDGE}test_communication.py::"
    "test_while_kafka_stands_still_what_is_not_published_takes_no_memory[]",
    "tests/torture/test_sabotage.py::test_the_right_bridge_passes_the_drill_of_a_forgotten_part",
    f"{_BRIDGE}test_large_transactions.py::test_streamed_as_in_the_article_and_published_at_commit",
    f"{_BRIDGE}test_large_rows.py::test_a_row_of_a_snapshot_that_the_broker_refuses[dead_letter]",
    f"{_BRIDGE}adoption/test_release.py::"
    "test_a_table_that_no_snapshot_can_read_keeps_it_from_being_given_back",
    f"{_BRIDGE}test_cloud_events_registry.py::"
    "test_each_event_is_read_by_the_sdk_and_its_data_by_its_dataschema[binary-avro",
    f"{_BRIDGE}test_cloud_events_registry.py::"
    "test_each_event_is_read_by_the_sdk_and_its_data_by_its_dataschema[binary-json-avro",
    f"{_BRIDGE}test_cloud_events_registry.py::"
    "test_each_event_is_read_by_the_sdk_and_its_data_by_its_dataschema[structured-avro",
    f"{_BRIDGE}test_snapshot_from_standby.py::"
    "test_what_the_standby_is_not_asked_for_comes_from_the_primary[standby]",
    f"{_BRIDGE}test_snapshot_published_bugs.py::"
    "test_a_request_is_not_lost_where_a_restart_reads_other_tables_anew",
    f"{_FAILOVER}test_held_up.py::"
    "test_a_query_on_the_standby_holds_up_a_switchover_while_writes_go_on",
    f"{_FAILOVER}test_fence.py::"
    "test_the_label_is_given_although_the_run_was_killed_after_the_promotion",
    f"{_FAILOVER}test_mirrored.py::test_fast_forward_whose_source_dies",
    "tests/local/test_owner.py::test_nothing_runs_after_the_owner_ended[2-pair]",
    f"{_TABLES}test_formats.py::test_all_types_and_changes_are_in_the_tables[avro-True]",
    f"{_TABLES}test_consistency.py::test_sums_agree_at_every_epoch_while_transfers_go_on[long]",
    f"{_TABLES}test_cluster.py::"
    "test_spark_submit_runs_the_same_job_on_two_workers_that_lose_executors[2]",
    "tests/consumer/test_live.py::test_the_example_keeps_a_copy_exactly_once_through_kills[10]",
    f"{_FAILOVER}test_mirrored.py::test_guard_data_loss",
    f"{_FAILOVER}test_mirrored.py::test_timeline_fork_3node_auto_detect",
    f"{_BRIDGE}test_snapshot_default.py::test_a_prefix_that_began_without_rows_stays_without",
    f"{_BRIDGE}test_snapshot_default.py::test_a_column_that_is_renamed_before_the_first_chunk",
    f"{_BRIDGE}test_snapshot_modes.py::test_a_slot_that_goes_while_the_bridge_runs_is_repaired",
    f"{_BRIDGE}test_signal_topic.py::test_sent_while_no_bridge_runs_and_killed_after_it",
    f"{_BRIDGE}test_snapshot.py::"
    "test_changed_all_the_time_and_killed_at_each_seam_of_a_chunk[chunk begun-3]",
    f"{_BRIDGE}test_snapshot.py::"
    "test_changed_all_the_time_and_killed_at_each_seam_of_a_chunk[chunk handed-3]",
    f"{_BRIDGE}test_snapshot.py::"
    "test_changed_all_the_time_and_killed_at_each_seam_of_a_chunk[chunk marked-3]",
    f"{_BRIDGE}test_recover.py::test_the_same_database_needs_no_acceptance",
    f"{_BRIDGE}test_row_rules_live.py::test_recover_compares_and_publishes_the_rows_that_fit",
    f"{_BRIDGE}test_doctor.py::test_streams_and_empty_transactions_are_told",
    f"{_TABLES}test_rules.py::test_a_column_that_is_left_out_stays_out_while_its_name_changes",
    f"{_TABLES}test_rules.py::test_a_rule_with_two_meanings_is_refused_until_it_is_put_back",
    f"{_TABLES}test_job.py::test_the_status_after_a_start_is_that_of_the_last_epoch",
    f"{_TABLES}test_index_upkeep.py::test_a_key_with_null_that_somebody_else_writes",
    f"{_FILLS}test_what_no_event_tells_is_logged",
    f"{_FILLS}test_a_value_that_does_not_fit_is_logged",
)
"""How the names of the tests begin, as pytest prints them."""


LONG_ON_THE_OLDEST: Final = tuple(
    f"{_BRIDGE}scenarios/test_{name}.py::"
    for name in (
        *("identity", "oracle", "past_keys", "schema_changes"),
        *("subscription_bugs", "subscription_stream"),
    )
)
"""Files of the bridge's scenarios that `make test` runs on the newest PostgreSQL alone."""


def is_long(nodeid: str) -> bool:
    """Tell whether a test is left to `make test-long`."""
    oldest = nodeid.startswith(LONG_ON_THE_OLDEST) and "[postgres-17" in nodeid
    return oldest or nodeid.startswith(LONG)
