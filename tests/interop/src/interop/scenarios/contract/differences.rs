//! Checks of `tests/apps/c` that fail over rdma_rxe, and how.

/// A check that rdma_rxe fails.
pub(super) struct Difference {
    /// Program and check.
    pub(super) check: (&'static str, &'static str),
    /// Beginning of its message.
    pub(super) says: &'static str,
    /// Why.
    pub(super) because: &'static str,
}

pub(super) const fn differs(
    program: &'static str,
    check: &'static str,
    says: &'static str,
    because: &'static str,
) -> Difference {
    Difference {
        check: (program, check),
        says,
        because,
    }
}

/// Checks that are not run over rdma_rxe.
pub(super) const LEFT_OUT: &[(&str, &str)] = &[
    // Where a queue pair goes that has a bound window, rdma_rxe waits for 50 s, and then frees what the window goes on to
    // name: the guest might not survive the next use of it.
    ("posting", "windows_end_with_their_queue_pair"),
    // libibverbs follows any pointer: what comes of these depends on what lies there.
    ("strangers", "objects_that_were_changed_are_refused"),
    ("strangers", "nothing_of_ours_is_refused"),
    ("strangers", "what_was_destroyed_is_refused"),
    ("strangers", "contexts_that_were_closed_are_refused"),
];

pub(super) const DIFFERENCES: &[Difference] = &[
    differs(
        "edges",
        "nothing_is_no_object",
        "signal 11",
        "libibverbs follows any pointer",
    ),
    differs(
        "edges",
        "xrc_is_shared",
        "!domain(file, 0) && errno == EAGAIN: Operation not supported",
        "rdma_rxe has no XRC",
    ),
    differs(
        "edges",
        "xrc_halves_ignore_attributes_of_the_other",
        "in = domain(-1, O_CREAT): Operation not supported",
        "rdma_rxe has no XRC",
    ),
    differs(
        "edges",
        "hop_limits_and_classes_arrive",
        "hop limit 64, not 77",
        "the kernel takes the hop limit of the route",
    ),
    differs(
        "contract",
        "sizes_of_xrc_senders_are_ignored",
        "qp = ibv_create_qp_ex(context, &xrc): Operation not supported",
        "rdma_rxe has no XRC",
    ),
    differs(
        "contract",
        "bindings_ignore_leftover_lists",
        "!ibv_post_send(qp, &wr, &bad): Success",
        "its library refuses a binding with data",
    ),
    differs(
        "contract",
        "null_windows_are_refused",
        "signal 11",
        "its library follows the pointer",
    ),
    differs(
        "contract",
        "oversized_batches_are_enomem",
        "batch(ex, 10, room(ex) + 1) == ENOMEM",
        "its library says ENOSPC",
    ),
    differs(
        "contract",
        "batches_with_a_bad_request_are_refused",
        "ibv_wr_complete(ex) == EINVAL",
        "its library does not look at lengths",
    ),
    differs(
        "contract",
        "memory_must_be_readable",
        "!ibv_reg_mr(pd, at, 3 * page, IBV_ACCESS_REMOTE_READ)",
        "the kernel pins it by force",
    ),
    differs(
        "contract",
        "reregistered_memory_must_be_writable",
        "ibv_rereg_mr",
        "rdma_rxe has no ibv_rereg_mr",
    ),
    differs(
        "contract",
        "lists_too_long_are_not_read",
        "signal 11",
        "its library adds the lengths up first",
    ),
    differs(
        "contract",
        "unknown_operations_are_refused",
        "ibv_post_send(qp, wr, &bad) == EINVAL",
        "its library takes any number",
    ),
    differs(
        "contract",
        "bindings_of_type_1_are_refused",
        "ibv_post_send(qp, wr, &bad) == EINVAL",
        "it binds windows of either type",
    ),
    differs(
        "contract",
        "checksums_are_refused",
        "ibv_post_send(qp, wr, &bad) == EINVAL",
        "its library takes any flag",
    ),
    differs(
        "contract",
        "reregistering_reports_kernel_errors",
        "ibv_rereg_mr",
        "rdma_rxe has no ibv_rereg_mr",
    ),
    differs(
        "contract",
        "on_demand_access_is_accepted",
        "other = ibv_reg_mr",
        "the kernel refuses it",
    ),
    differs(
        "contract",
        "implicit_on_demand_regions_are_refused",
        "!ibv_reg_mr",
        "the kernel refuses it with EINVAL",
    ),
    differs(
        "contract",
        "completions_have_timestamps",
        "stamped = ibv_create_cq_ex(context, &cq_init): Operation not supported",
        "rdma_rxe has no clock",
    ),
    differs(
        "contract",
        "thread_domains_are_busy_under_a_parent_domain",
        "with.td = ibv_alloc_td(context, &none): Operation not supported",
        "rdma_rxe has no thread domains",
    ),
    differs(
        "posting",
        "atomics_of_less_than_eight_bytes_fail",
        "!post(qp,",
        "its library refuses them",
    ),
    differs(
        "posting",
        "atomics_of_more_than_eight_bytes_fail",
        "1: success",
        "the first eight bytes are taken",
    ),
    differs(
        "posting",
        "alignment_goes_before_the_key",
        "!post(qp,",
        "its library refuses a misaligned atomic",
    ),
    differs(
        "posting",
        "a_refused_write_with_immediate_ends_its_receive",
        "10: remote access error",
        "the receive has the sender's error",
    ),
    differs(
        "posting",
        "what_fails_stops_the_sends_of_uc_alone",
        "state(qp) == IBV_QPS_SQE",
        "all of the queue pair stops",
    ),
    differs(
        "posting",
        "what_ud_lacks_fails_in_its_turn",
        "signal 11",
        "its library follows the pointer of a datagram",
    ),
    differs(
        "posting",
        "keys_are_those_of_what_was_posted",
        "a->rkey == key",
        "its library leaves the key",
    ),
    differs(
        "posting",
        "receives_tell_which_window_was_taken_back",
        "wc.status == IBV_WC_SUCCESS && wc.wc_flags & IBV_WC_WITH_INV",
        "the kernel's flag is another one",
    ),
    differs(
        "posting",
        "regions_beneath_windows_are_in_use",
        "ibv_dereg_mr(region) == EBUSY",
        "it is EINVAL",
    ),
    differs(
        "posting",
        "others_do_not_take_windows_back",
        "2: success",
        "no queue pair is compared",
    ),
    differs(
        "posting",
        "others_are_not_asked_to_take_windows_back",
        "10: success",
        "no queue pair is compared",
    ),
    differs(
        "posting",
        "windows_open_their_range_and_no_more",
        "1: success",
        "the region's range is compared",
    ),
    differs(
        "limits",
        "receive_queues_are_no_longer_than_granted",
        "fill_receives(4) == ENOMEM",
        "queues are one less than a power of two",
    ),
    differs(
        "limits",
        "send_queues_are_no_longer_than_granted",
        "fill_sends(4) == ENOMEM",
        "queues are one less than a power of two",
    ),
    differs(
        "limits",
        "reads_of_a_responder_are_no_more_than_promised",
        "to_rtr(qp, limits.max_qp_rd_atom + 1) == EINVAL",
        "any number is taken",
    ),
    differs(
        "limits",
        "reads_of_all_responders_are_those_of_each",
        "limits.max_res_rd_atom ==",
        "it promises fewer",
    ),
    differs(
        "limits",
        "shared_queues_are_no_longer_than_granted",
        "fill_shared(4) == ENOMEM",
        "queues are one less than a power of two",
    ),
    differs(
        "limits",
        "domains_are_as_many_as_promised",
        "all && (limits.max_pd) <= CHEAP",
        "more are promised than are tried",
    ),
    differs(
        "limits",
        "address_handles_are_as_many_as_promised",
        "!(ibv_create_ah(pd, &to)) && errno == ENOMEM: Invalid argument",
        "it is EINVAL",
    ),
    differs(
        "limits",
        "windows_are_as_many_as_promised",
        "all && (limits.max_mw) <= CHEAP",
        "more are promised than are tried",
    ),
    differs(
        "limits",
        "completion_queues_are_as_many_as_promised",
        "all && (limits.max_cq) <= CHEAP",
        "more are promised than are tried",
    ),
    differs(
        "limits",
        "shared_queues_are_as_many_as_promised",
        "all && (limits.max_srq) <= CHEAP",
        "more are promised than are tried",
    ),
    differs(
        "limits",
        "tables_end_where_they_say",
        "!ibv_query_gid(context, 1, port.gid_tbl_len - 1, &gid): Invalid argument",
        "an empty entry of the table is an error",
    ),
    differs(
        "limits",
        "partitions_end_with_their_table",
        "ibv_modify_qp(qp, &attr, mask) == EINVAL",
        "any index is taken",
    ),
    differs(
        "limits",
        "partitions_are_as_many_as_promised",
        "limits.max_pkeys ==",
        "64 are promised, its port has one",
    ),
    differs(
        "limits",
        "messages_are_as_long_as_promised",
        "!got ",
        "the error is another one",
    ),
    differs(
        "limits",
        "messages_are_no_longer_than_promised",
        "ibv_post_send(qp, &wr, &bad) == EINVAL",
        "the responder looks at the length alone",
    ),
    differs(
        "limits",
        "states_are_modified_as_promised",
        "limits.device_cap_flags & (IBV_DEVICE_CURR_QP_STATE_MOD)",
        "it is not promised, but done",
    ),
    differs(
        "limits",
        "xrc_is_promised",
        "limits.device_cap_flags & (IBV_DEVICE_XRC)",
        "rdma_rxe has no XRC",
    ),
    differs(
        "limits",
        "checksums_are_neither_promised_nor_made",
        "ibv_post_send(qp, &wr, &bad) == EINVAL",
        "its library takes any flag",
    ),
    differs(
        "limits",
        "alternate_paths_are_neither_promised_nor_taken",
        "!(limits.device_cap_flags & (IBV_DEVICE_AUTO_PATH_MIG))",
        "it is promised, and refused",
    ),
    differs(
        "limits",
        "the_clock_is_as_promised",
        "attr.completion_timestamp_mask == UINT64_MAX",
        "rdma_rxe has no clock",
    ),
    differs(
        "limits",
        "atomic_writes_are_there_if_promised",
        "!qp == !(",
        "its library does not ask the kernel",
    ),
    differs(
        "limits",
        "atomic_writes_are_promised",
        "attr.device_cap_flags_ex >> 32 == 1 << 8",
        "rdma_rxe of 6.1 has none",
    ),
    differs(
        "strangers",
        "handles_that_nobody_has_are_refused",
        "ibv_modify_qp(s->qp, &attr, IBV_QP_STATE) is 2",
        "it is ENOENT of all verbs",
    ),
    differs(
        "strangers",
        "objects_of_two_contexts_are_refused",
        "ibv_create_qp(o->pd, &init): errno 0",
        "the object of this context that has the number is taken",
    ),
];
