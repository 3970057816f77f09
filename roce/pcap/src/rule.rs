//! Rules by which captures are judged. Generated from specs/rules.toml by `cargo xtask specs --write`.

use crate::severity::{Fault, Severity};

macro_rules! rules {
    ($( $(#[$doc:meta])* $name:ident = $id:literal, $severity:ident, $fault:ident; )*) => {
        /// Rule.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        pub enum Rule { $( $(#[$doc])* $name, )* }

        impl Rule {
            /// All rules.
            pub const ALL: [Self; [$($id),*].len()] = [$(Self::$name),*];

            /// Returns the stable name.
            pub const fn id(self) -> &'static str {
                match self { $( Self::$name => $id, )* }
            }

            /// Returns how bad it is to break it.
            pub const fn severity(self) -> Severity {
                match self { $( Self::$name => Severity::$severity, )* }
            }

            /// Returns who is at fault, seen from the packet that breaks it.
            pub const fn fault(self) -> Fault {
                match self { $( Self::$name => Fault::$fault, )* }
            }
        }
    };
}

rules! {
    /// The invariant CRC covers the packet and the invariant fields of its IP and UDP headers. A receiver drops a
    /// packet with a wrong one. (IBA 7.8.1, A17.3.3, CA17-22, CA17-24)
    FrameIcrc = "frame-icrc", Error, Network;
    /// The ICRC is right for other addresses, which the request names as its own: a device on the way translates
    /// addresses. (IBA A17.3.3, CA17-22)
    FrameTranslated = "frame-translated", Note, Network;
    /// Lengths and headers agree: extended headers as the opcode says, payload and pad in whole words, transport header
    /// version 0. (IBA 9.6.1, A17.3.1, A17.3.2.3, CA17-2, CA17-6, CA17-15, CA17-21)
    FrameMalformed = "frame-malformed", Error, Sender;
    /// The opcode is one of the table's. (IBA chapter 9, opcodes of the base transport header)
    FrameOpcode = "frame-opcode", Error, Sender;
    /// RoCEv2 packets are not fragmented. (IBA A17.3.1.1.6, CA17-8)
    FrameFragment = "frame-fragment", Error, Sender;
    /// The IPv4 header has no options. (IBA A17.3.1.1.1, CA17-3)
    FrameIpOptions = "frame-ip-options", Error, Sender;
    /// RoCE has no QP0. (IBA A17.6, CA17-33)
    FrameQp0 = "frame-qp0", Error, Sender;
    /// DF is set in IPv4 headers, as packets are not fragmented. (IBA A17.3.1.1.5, CA17-7)
    FrameDfClear = "frame-df-clear", Note, Sender;
    /// The IPv4 header checksum is right. A capture on the sending host shows what the NIC has yet to fill in. (RFC 791
    /// 3.1)
    FrameIpChecksum = "frame-ip-checksum", Note, Capture;
    /// The capture kept a part of the frame (tcpdump -s): its ICRC and payload can't be checked. (pcap file format)
    FrameCut = "frame-cut", Note, Capture;
    /// Several packets are in one frame: it was captured before segmentation (GSO) or after merging (GRO). (Linux,
    /// UDP_SEGMENT and UDP_GRO)
    FrameSegments = "frame-segments", Note, Capture;
    /// RoCE version 1, Ethernet type 0x8915, is not judged. (IBA A16, A17.8)
    FrameRoceV1 = "frame-roce-v1", Note, None;
    /// Frames of a link type that is not read are not judged. (pcap link types)
    FrameLinkType = "frame-link-type", Note, Capture;
    /// The packet is carried by another one, or may be in one that is not read. (RFC 7348, RFC 8926, RFC 2784, RFC
    /// 2003)
    FrameTunnel = "frame-tunnel", Note, None;
    /// The file ends early or contradicts itself; what follows is not seen. (pcap and pcapng file formats)
    FileBroken = "file-broken", Error, Capture;
    /// The first request has the PSN that the peer named in its REQ or REP. (IBA chapter 12, starting PSN of REQ and
    /// REP (tables 106 and 110))
    PsnStart = "psn-start", Error, Sender;
    /// Each request follows the one before without a gap: PSNs are not left out for good. (IBA 9.7)
    PsnSkipped = "psn-skipped", Error, Sender;
    /// A PSN that has been sent is sent again only with the same request. (IBA 9.7)
    PsnReused = "psn-reused", Error, Sender;
    /// A READ takes as many PSNs as its response has packets; the next request begins behind them. (IBA 9.7)
    ReadSpanReused = "read-span-reused", Error, Sender;
    /// A repeated packet has the payload of the first one; otherwise the program changed its buffer before the
    /// completion. (IBA 9.7, 10.7)
    RepeatDiffers = "repeat-differs", Warning, Sender;
    /// A message's packets are FIRST, MIDDLE and LAST of one operation in a row, or one ONLY. (IBA 9.7.4.1)
    OpcodeSequence = "opcode-sequence", Error, Sender;
    /// All packets of a queue pair are of one transport service, and an operation that the service has. (IBA 9.7.4.1)
    OpcodeService = "opcode-service", Error, Sender;
    /// FIRST and MIDDLE packets are as long as the path MTU, LAST and ONLY packets at most that long, and a LAST one
    /// not empty. (IBA 9.7.4.1, C9-92)
    PayloadLength = "payload-length", Error, Sender;
    /// The payload of an RDMA WRITE is together as long as its RETH says. (IBA 9.7.4.1)
    WriteLength = "write-length", Error, Sender;
    /// The length in a RETH is at most 2^31 bytes. (IBA 9.7.4.1, C9-94)
    RethLength = "reth-length", Error, Sender;
    /// No more READs and atomic operations are outstanding than the connection's initiator depth allows. (IBA 9.7,
    /// chapter 12, initiator depth of REQ and REP (tables 106 and 110))
    ReadDepth = "read-depth", Error, Sender;
    /// A READ that is asked for again asks for a part of its range: address and key follow from its PSN, and it does
    /// not go beyond the end. (IBA 9.4.4)
    ReadRetry = "read-retry", Error, Sender;
    /// The address of an atomic operation is a multiple of eight. (IBA 9.4, 9.7.4.1)
    AtomicAlignment = "atomic-alignment", Error, Sender;
    /// After an RNR NAK the request is repeated no earlier than the NAK's time. (IBA 9.7.5.2.8)
    RnrEarly = "rnr-early", Note, Sender;
    /// After a fatal NAK the queue pair is in error and sends no new request. (IBA 9.9, 10.3.1)
    RequestAfterNak = "request-after-nak", Error, Sender;
    /// No request follows the end of a connection (DREQ answered by DREP). (IBA 12.10.8, communication release)
    RequestAfterDisconnect = "request-after-disconnect", Warning, Sender;
    /// A request that asks for an answer gets one. The receiver, or the network between it and the capture, is silent.
    /// (IBA 9.7.6.1.3 (C9-140))
    NoAnswer = "no-answer", Warning, Receiver;
    /// A request was answered only a second or more after it was first sent. (ferroce)
    Stall = "stall", Note, None;
    /// A datagram has at most 4096 bytes of payload. (IBA 9.8)
    DatagramLength = "datagram-length", Error, Sender;
    /// An answer has the PSN of a request that was sent. (IBA 9.7.5)
    AckGhost = "ack-ghost", Error, Sender;
    /// A READ or an atomic operation is answered before anything behind it is acknowledged; the requester must take it
    /// for lost. (IBA 9.7.5.1.2)
    AckPassesRead = "ack-passes-read", Warning, Sender;
    /// The MSN of an answer is the number of messages that the responder has completed: at least those before the
    /// answer's PSN, at most those that were sent. (IBA 9.7, C9-148)
    Msn = "msn", Error, Sender;
    /// The syndrome of an AETH is none of the reserved ones. (IBA 9.7.5.2)
    Syndrome = "syndrome", Error, Sender;
    /// Acknowledged requests are not refused. (IBA 9.7.5.1.2, 9.7.5.2)
    NakAcknowledged = "nak-acknowledged", Error, Sender;
    /// A gap is reported once, until the missing packet has come. (IBA 9.7.5)
    NakRepeated = "nak-repeated", Warning, Sender;
    /// After an RNR NAK the responder is silent until the refused request comes again. (IBA 9.7.5.2.8)
    NakAfterRnr = "nak-after-rnr", Warning, Sender;
    /// The responder refused a request for good; the connection is over. (IBA 9.7.5.2)
    NakFatal = "nak-fatal", Note, None;
    /// An RNR NAK answers a request that takes a receive: SEND, or WRITE with immediate. (IBA 9.7.5.2.8)
    RnrWithoutReceive = "rnr-without-receive", Warning, Sender;
    /// A program posts receives for what it is sent: RNR NAKs end before the requester's retries do. (IBA 9.7.5.2.8,
    /// C9-132)
    RnrUnresolved = "rnr-unresolved", Warning, Sender;
    /// After a fatal NAK the responder executes and answers nothing more. (IBA 9.9, 10.3.1)
    AnswerAfterNak = "answer-after-nak", Error, Sender;
    /// READ responses and atomic acknowledgements answer a READ and an atomic operation with that PSN. (IBA 9.7.5.1)
    ResponseUnrequested = "response-unrequested", Error, Sender;
    /// The responses to a READ are FIRST, MIDDLE and LAST by their PSNs, or one ONLY. (IBA 9.7.5.1)
    ResponseSequence = "response-sequence", Error, Sender;
    /// A READ that is asked for again from the middle is answered from FIRST to LAST. (IBA 9.7.5.1)
    ResponseResumed = "response-resumed", Warning, Sender;
    /// READ responses are as long as the path MTU, the last one as long as what remains of the READ. (IBA 9.7.5.1)
    ResponseLength = "response-length", Error, Sender;
    /// READs and atomic operations are answered in the order of their PSNs. (IBA 9.7.5.1.2, C9-110)
    ResponseOrder = "response-order", Error, Sender;
    /// A READ is answered again only after it is asked for again. (IBA 9.7.5.1, C9-110)
    ResponseRepeated = "response-repeated", Warning, Network;
    /// A receiver of packets that experienced congestion sends congestion notifications. (IBA A17.9.3, CA17-44)
    EcnUnanswered = "ecn-unanswered", Warning, Receiver;
    /// Management datagrams go to QP1 as UD SEND ONLY with QP1's Q_Key and the default partition. (IBA 9.6.1.4.1,
    /// C9-42, chapter 13, A17.6.1)
    GsiHeader = "gsi-header", Error, Sender;
    /// The GIDs of a REQ's primary path are the addresses of the packets. (IBA chapter 12, port GIDs of REQ (table
    /// 106), A17.4.1.1)
    CmAddress = "cm-address", Warning, Sender;
    /// The initiator depth of a REP is at most the responder resources of its REQ. (IBA chapter 12, initiator depth of
    /// REP and responder resources of REQ (tables 106 and 110))
    CmDepth = "cm-depth", Warning, Sender;
    /// The path MTU code of a REQ is 1 (256) to 5 (4096). (IBA chapter 12, path packet payload MTU of REQ (table 106))
    CmMtu = "cm-mtu", Error, Sender;
    /// A REQ is answered by REP, REJ or MRA, a DREQ by DREP. (IBA chapter 12, 12.10.8 for DREQ)
    CmNoAnswer = "cm-no-answer", Warning, Receiver;
    /// A connection was rejected. (IBA chapter 12, REJ (table 108))
    CmRejected = "cm-rejected", Note, None;
    /// A request to connect has version 3.1 or 4 with a common minor version; the answer has the version that follows
    /// from the request's. A peer rejects or drops others. (Linux net/rds/ib_cm.c, rds_ib_protocol_compatible)
    RdsVersion = "rds-version", Error, Sender;
    /// The private data of a request to connect names the addresses of its packet; the answer's has them swapped, and
    /// the same type of service. (Linux net/rds/ib_cm.c, struct rds_ib_connect_private)
    RdsPrivate = "rds-private", Warning, Sender;
    /// The number in a reject is at most 1 in the byte order of x86 and Arm. A kernel that gets another one waits for
    /// ever and does not connect again. (Linux net/rds/rdma_transport.c, rds_rdma_cm_event_handler_cmn)
    RdsReject = "rds-reject", Error, Sender;
    /// Each SEND has a header of 48 bytes. A message has at most 1 MiB; its fragments have 4096 bytes of it each, and
    /// the last one what remains. (Linux net/rds/ib_recv.c, RDS_FRAG_SIZE, RDS_MAX_MSG_SIZE)
    RdsLength = "rds-length", Error, Sender;
    /// The checksum of a header is right, or 0 for none. A receiver drops the connection because of a wrong one. (Linux
    /// net/rds/ib_recv.c, rds_message_verify_checksum)
    RdsChecksum = "rds-checksum", Error, Sender;
    /// The fragments of a message have the same sequence number, length and ports, and only acknowledgements come
    /// between them. A receiver drops the connection otherwise. (Linux net/rds/ib_recv.c, rds_ib_process_recv)
    RdsFragment = "rds-fragment", Error, Sender;
    /// Sequence numbers of messages begin with 1 and grow on a connection, also by more than 1. Only a message with
    /// RETRANSMITTED has one that was sent before. (Linux net/rds/recv.c, rds_recv_incoming)
    RdsSequence = "rds-sequence", Error, Sender;
    /// A message that is sent again over a later connection has RETRANSMITTED; otherwise the receiver delivers it
    /// twice. (Linux net/rds/recv.c, rds_recv_incoming; net/rds/send.c, rds_send_path_reset)
    RdsRepeat = "rds-repeat", Warning, Sender;
    /// The sender's sequence numbers begin again with 1 over a later connection: it was started again. (Linux
    /// net/rds/send.c, cp_next_tx_seq)
    RdsRestart = "rds-restart", Note, None;
    /// Only messages that were sent are acknowledged. The peer takes those of a higher number for delivered and forgets
    /// them. (Linux net/rds/send.c, rds_send_path_drop_acked)
    RdsAckFuture = "rds-ack-future", Error, Sender;
    /// The acknowledged sequence number does not go back on a connection. Kernels acknowledge the message that they
    /// looked at last, also one that they drop. (Linux net/rds/ib_recv.c, rds_ib_set_ack; measured with 6.1)
    RdsAckBack = "rds-ack-back", Note, Sender;
    /// A sender asks for acknowledgements now and then, kernels with the ninth message: without ACK_REQUIRED none
    /// comes, and its queue fills. 128 messages in a row ask for none. (Linux net/rds/send.c,
    /// rds_sysctl_max_unacked_packets)
    RdsAckAsked = "rds-ack-asked", Warning, Sender;
    /// The last fragment of a message or map, and an acknowledgement without data, are solicited: a kernel does not
    /// look at others before the next one that is. (Linux net/rds/ib_recv.c, ib_req_notify_cq with IB_CQ_SOLICITED)
    RdsSolicited = "rds-solicited", Warning, Sender;
    /// A congestion map has the flag CONG_BITMAP alone, and 8192 bytes. A kernel ignores others, and takes one with
    /// another flag for data with sequence number 0. (Linux net/rds/ib_recv.c, rds_ib_cong_recv; measured with 6.1)
    RdsMap = "rds-map", Error, Sender;
    /// A congestion map has sequence number and ports 0; kernels ignore what is there. (Linux net/rds/message.c,
    /// rds_message_populate_header; measured with 6.1)
    RdsMapNumbers = "rds-map-numbers", Warning, Sender;
    /// No new message goes to a port that the peer's map has shown as congested for a second or more. (Linux
    /// net/rds/cong.c, rds_cong_wait)
    RdsCongested = "rds-congested", Warning, Sender;
    /// A message has magic, type, and lengths that fit: at most 4096 bytes, 1 to 257 fragments, no data with an ACK or
    /// GET. A receiver closes the connection because of others. (Lustre o2iblnd.c, kiblnd_unpack_msg; lib-move.c,
    /// lnet_parse)
    LnetFormat = "lnet-format", Error, Sender;
    /// A checksum that is not 0 is right. A receiver closes the connection because of a wrong one. (Lustre o2iblnd.c,
    /// kiblnd_cksum)
    LnetChecksum = "lnet-checksum", Error, Sender;
    /// An answer to a request to connect is of its version, and has at most its queue depth and fragments; neither is
    /// 0. The requester closes the connection otherwise. (Lustre o2iblnd_cb.c, kiblnd_check_connreply)
    LnetParameters = "lnet-parameters", Error, Sender;
    /// All messages name the two nodes of the connection. A receiver closes the connection because of another one.
    /// (Lustre o2iblnd_cb.c, kiblnd_handle_rx, ESTALE)
    LnetNid = "lnet-nid", Error, Sender;
    /// All messages have the incarnations of both nodes that the connection was made with. Others are of a node that
    /// was started again, and the receiver closes the connection. (Lustre o2iblnd_cb.c, kiblnd_handle_rx, ESTALE)
    LnetStamp = "lnet-stamp", Error, Sender;
    /// IMMEDIATE, PUT_REQ and GET_REQ take one of as many credits as the queue is deep; no more are taken than there
    /// are, and no more returned than were taken. (Lustre o2iblnd_cb.c, kiblnd_post_tx_locked, kiblnd_handle_rx)
    LnetCredits = "lnet-credits", Error, Sender;
    /// PUT_ACK and PUT_NAK answer a PUT_REQ, PUT_DONE a PUT_ACK, and GET_DONE a GET_REQ, by its cookie, and once. A
    /// receiver closes the connection because of others. (Lustre o2iblnd_cb.c, kiblnd_find_waiting_tx_locked)
    LnetCookie = "lnet-cookie", Error, Sender;
    /// An RDMA WRITE goes into a fragment that the peer described for a transfer that is not done, and each byte is
    /// written once. (Lustre o2iblnd_cb.c, kiblnd_init_rdma)
    LnetSink = "lnet-sink", Error, Sender;
    /// A PUT_DONE or GET_DONE reports as many bytes as were written: the receiver takes memory that was not written for
    /// data. (Lustre o2iblnd_cb.c, kiblnd_init_rdma, kiblnd_send_completion)
    LnetBytes = "lnet-bytes", Error, Sender;
}
