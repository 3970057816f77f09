-- ferroce for Wireshark and tshark: checks the invariant CRC (ICRC) of RoCEv2 packets, and dissects RTRS, RNBD and RDS.
--
-- Copy it into the folder of personal Lua plugins (Help, About Wireshark, Folders), or: tshark -X lua_script:ferroce.lua -r trace.pcap
-- Examples of filters: ferroce.icrc.status == "bad", ferroce.rtrs.errno > 0, ferroce.rnbd.lba == 2048, ferroce.rds.flags.retransmitted

local ferroce = Proto("ferroce", "ferroce: ICRC, RTRS, RNBD, RDS")

local fields = {
    icrc_status = ProtoField.string("ferroce.icrc.status", "ICRC status"),
    icrc_expected = ProtoField.uint32("ferroce.icrc.expected", "ICRC expected", base.HEX),

    rtrs_type = ProtoField.string("ferroce.rtrs.type", "RTRS message"),
    rtrs_permit = ProtoField.uint32("ferroce.rtrs.permit", "Permit (chunk)"),
    rtrs_offset = ProtoField.uint32("ferroce.rtrs.offset", "Offset in the chunk"),
    rtrs_errno = ProtoField.uint32("ferroce.rtrs.errno", "Error number"),
    rtrs_invalidated = ProtoField.bool("ferroce.rtrs.invalidated", "Key invalidated"),
    rtrs_usr_len = ProtoField.uint16("ferroce.rtrs.usr_len", "Bytes of user header"),
    rtrs_sg_count = ProtoField.uint16("ferroce.rtrs.sg_count", "Descriptors"),
    rtrs_sg_addr = ProtoField.uint64("ferroce.rtrs.sg.addr", "Address", base.HEX),
    rtrs_sg_key = ProtoField.uint32("ferroce.rtrs.sg.key", "Remote key", base.HEX),
    rtrs_sg_len = ProtoField.uint32("ferroce.rtrs.sg.len", "Bytes"),
    rtrs_name = ProtoField.string("ferroce.rtrs.session", "Session name"),
    rtrs_cid = ProtoField.uint16("ferroce.rtrs.cid", "Connection number"),
    rtrs_cid_num = ProtoField.uint16("ferroce.rtrs.cid_num", "Connections of the path"),
    rtrs_recon = ProtoField.uint16("ferroce.rtrs.recon_cnt", "Connection attempts"),
    rtrs_version = ProtoField.uint16("ferroce.rtrs.version", "Version", base.HEX),
    rtrs_path = ProtoField.guid("ferroce.rtrs.path_uuid", "Path"),
    rtrs_session = ProtoField.guid("ferroce.rtrs.session_uuid", "Session"),
    rtrs_queue_depth = ProtoField.uint16("ferroce.rtrs.queue_depth", "Queue depth"),
    rtrs_max_io = ProtoField.uint32("ferroce.rtrs.max_io_size", "Largest data, bytes"),
    rtrs_max_hdr = ProtoField.uint32("ferroce.rtrs.max_hdr_size", "Room for headers, bytes"),

    rnbd_type = ProtoField.string("ferroce.rnbd.type", "RNBD message"),
    rnbd_device = ProtoField.uint32("ferroce.rnbd.device", "Device"),
    rnbd_op = ProtoField.string("ferroce.rnbd.op", "Operation"),
    rnbd_lba = ProtoField.uint64("ferroce.rnbd.lba", "First sector (512 bytes)"),
    rnbd_bytes = ProtoField.uint32("ferroce.rnbd.bytes", "Bytes"),
    rnbd_sync = ProtoField.bool("ferroce.rnbd.flags.sync", "Synchronous"),
    rnbd_fua = ProtoField.bool("ferroce.rnbd.flags.fua", "Forced unit access"),
    rnbd_preflush = ProtoField.bool("ferroce.rnbd.flags.preflush", "Flush first"),
    rnbd_prio = ProtoField.uint16("ferroce.rnbd.prio", "Priority"),
    rnbd_name = ProtoField.string("ferroce.rnbd.name", "Device name"),
    rnbd_access = ProtoField.string("ferroce.rnbd.access", "Access"),
    rnbd_version = ProtoField.uint8("ferroce.rnbd.version", "Version"),
    rnbd_sectors = ProtoField.uint64("ferroce.rnbd.sectors", "Size, sectors"),

    rds_type = ProtoField.string("ferroce.rds.type", "RDS message"),
    rds_sequence = ProtoField.uint64("ferroce.rds.sequence", "Sequence number"),
    rds_ack = ProtoField.uint64("ferroce.rds.ack", "Acknowledged"),
    rds_len = ProtoField.uint32("ferroce.rds.len", "Bytes of the message"),
    rds_sport = ProtoField.uint16("ferroce.rds.sport", "Source port"),
    rds_dport = ProtoField.uint16("ferroce.rds.dport", "Destination port"),
    rds_credit = ProtoField.uint8("ferroce.rds.credit", "Credit"),
    rds_bitmap = ProtoField.bool("ferroce.rds.flags.bitmap", "Congestion map"),
    rds_ack_required = ProtoField.bool("ferroce.rds.flags.ack_required", "Acknowledgement required"),
    rds_retransmitted = ProtoField.bool("ferroce.rds.flags.retransmitted", "Retransmitted"),
}
do
    local list = {}
    for _, field in pairs(fields) do
        list[#list + 1] = field
    end
    ferroce.fields = list
end

local bad_icrc = ProtoExpert.new("ferroce.icrc.bad", "wrong ICRC", expert.group.CHECKSUM, expert.severity.ERROR)
local rtrs_error = ProtoExpert.new("ferroce.rtrs.error", "RTRS error", expert.group.RESPONSE_CODE, expert.severity.WARN)
ferroce.experts = { bad_icrc, rtrs_error }

ferroce.prefs.icrc = Pref.bool("Check the ICRC", true, "It is computed of each packet's bytes")

local field_ip = Field.new("ip")
local field_ipv6 = Field.new("ipv6")
local field_udp = Field.new("udp")
local field_bth = Field.new("infiniband.bth")

local UDP_LEN, BTH_LEN, ICRC_LEN, MAD_HEADER = 8, 12, 4, 24
-- The largest path MTU with all headers: longer ones are several packets in one frame.
local MAX_PACKET = 4096 + 64
-- Lengths of extended headers by the low five bits of the opcode, of reliable connections.
local EXTENDED = {
    [0x03] = 4, [0x05] = 4, [0x06] = 16, [0x09] = 4, [0x0a] = 16, [0x0b] = 20, [0x0c] = 16, [0x0d] = 4, [0x0f] = 4,
    [0x10] = 4, [0x11] = 4, [0x12] = 12, [0x13] = 28, [0x14] = 28, [0x16] = 4, [0x17] = 4, [0x1c] = 20, [0x1d] = 16,
}
local WITH_IMMEDIATE = { [0x03] = 0, [0x05] = 0, [0x09] = 0, [0x0b] = 16 }
local WRITE_ONLY = 0x0a
local SENDS = { [0x00] = true, [0x04] = true }

-- Checksums

local bxor, band, rshift = bit.bxor, bit.band, bit.rshift
local crc_table = {}
for n = 0, 255 do
    local crc = n
    for _ = 1, 8 do
        crc = band(crc, 1) == 1 and bxor(rshift(crc, 1), 0xedb88320) or rshift(crc, 1)
    end
    crc_table[n] = crc
end

local function crc_update(crc, bytes, first, last)
    for at = first, last do
        crc = bxor(crc_table[band(bxor(crc, bytes:byte(at)), 0xff)], rshift(crc, 8))
    end
    return crc
end

-- The ICRC of a datagram: `head` has its masked headers, `rest` what follows the BTH.
local function icrc(head, rest)
    local crc = crc_update(-1, ("\255"):rep(8) .. head, 1, 8 + #head)
    crc = bit.bnot(crc_update(crc, rest, 1, #rest))
    return crc % 0x100000000
end

-- Returns a string with bytes replaced by ones; `at` counts from 0.
local function masked(bytes, at, count)
    return bytes:sub(1, at) .. ("\255"):rep(count) .. bytes:sub(at + count + 1)
end

-- Packets

-- The last of several headers of a kind: the innermost.
local function innermost(extract)
    local all = { extract() }
    return all[#all]
end

-- Returns addresses and offsets of the RoCEv2 datagram in a frame, or nothing.
local function datagram(tvb)
    local udp, bth = innermost(field_udp), innermost(field_bth)
    if not udp or not bth or bth.offset ~= udp.offset + UDP_LEN then
        return nil
    end
    local ip4, ip6 = innermost(field_ip), innermost(field_ipv6)
    local ip = ip4
    if not ip or (ip6 and ip6.offset > ip.offset) then
        ip = ip6
    end
    if not ip or ip.offset >= udp.offset then
        return nil
    end
    local v4 = ip == ip4
    local addresses = v4 and { 12, 16, 4 } or { 8, 24, 16 }
    local address = function(at)
        return tvb:raw(ip.offset + at, addresses[3])
    end
    return {
        ip = ip.offset,
        v4 = v4,
        udp = udp.offset,
        at = bth.offset,
        len = tvb(udp.offset + 4, 2):uint() - UDP_LEN,
        src = address(addresses[1]),
        dst = address(addresses[2]),
    }
end

-- Returns the verdict on the ICRC, and the right one.
local function check_icrc(tvb, d)
    if d.len < BTH_LEN + ICRC_LEN then
        return "unchecked: too short"
    elseif d.at + d.len > tvb:len() then
        return "unchecked: the capture cut the frame"
    elseif d.len > MAX_PACKET then
        return "unchecked: several packets in one frame"
    end
    local head = tvb:raw(d.ip, d.at + BTH_LEN - d.ip)
    if d.v4 then
        if band(tvb(d.ip + 6, 2):uint(), 0x3fff) ~= 0 then
            return "unchecked: a fragment"
        end
        head = masked(masked(masked(head, 1, 1), 8, 1), 10, 2)
    else
        if d.udp ~= d.ip + 40 then
            return "unchecked: extension headers"
        end
        local first = string.char(bit.bor(head:byte(1), 0x0f))
        head = first .. masked(masked(head, 1, 3), 7, 1):sub(2)
    end
    -- The UDP checksum, and the byte with FECN and BECN.
    head = masked(head, d.udp - d.ip + 6, 2)
    head = masked(head, d.at - d.ip + 4, 1)
    local rest = tvb:raw(d.at + BTH_LEN, d.len - BTH_LEN - ICRC_LEN)
    local right = icrc(head, rest)
    local carried = tvb(d.at + d.len - ICRC_LEN, ICRC_LEN):le_uint()
    -- As it lies on the wire.
    local expected = tonumber(bit.tohex(bit.bswap(bit.tobit(right))), 16)
    return right == carried and "ok" or "bad", expected
end

-- Connections of RTRS, which the connection manager's messages show

-- Sides by address and queue pair: { layout = { bits, ... } }
local sides = {}
-- Requests by the requester's address and communication ID.
local requests = {}

function ferroce.init()
    sides, requests = {}, {}
end

local function key(address, number)
    return address .. string.format("%d", number)
end

local function bits_for(n)
    local bits = 0
    n = n - 1
    while n > 0 do
        n, bits = math.floor(n / 2), bits + 1
    end
    return bits
end

local function rtrs_request(tvb, at, d, tree)
    local subtree = tree:add(fields.rtrs_type, tvb(at, 56), "connection request")
    subtree:add_le(fields.rtrs_version, tvb(at + 4, 2))
    subtree:add_le(fields.rtrs_cid, tvb(at + 6, 2))
    subtree:add_le(fields.rtrs_cid_num, tvb(at + 8, 2))
    subtree:add_le(fields.rtrs_recon, tvb(at + 10, 2))
    subtree:add(fields.rtrs_path, tvb(at + 12, 16))
    subtree:add(fields.rtrs_session, tvb(at + 28, 16))
    local mad = d.at + BTH_LEN + 8 + MAD_HEADER
    requests[key(d.src, tvb(mad, 4):uint())] = { address = d.src, qpn = tvb(mad + 32, 3):uint() }
    return "RTRS connection request"
end

local function rtrs_reply(tvb, at, d, tree)
    local subtree = tree:add(fields.rtrs_type, tvb(at, 20), "connection response")
    local errno, depth = tvb(at + 4, 2):le_uint(), tvb(at + 6, 2):le_uint()
    subtree:add_le(fields.rtrs_version, tvb(at + 2, 2))
    subtree:add_le(fields.rtrs_errno, tvb(at + 4, 2))
    subtree:add_le(fields.rtrs_queue_depth, tvb(at + 6, 2))
    subtree:add_le(fields.rtrs_max_io, tvb(at + 8, 4))
    subtree:add_le(fields.rtrs_max_hdr, tvb(at + 12, 4))
    local mad = d.at + BTH_LEN + 8 + MAD_HEADER
    local request = requests[key(d.dst, tvb(mad + 4, 4):uint())]
    if request and tvb(mad - 8, 2):uint() == 0x13 and depth > 0 then
        local side = { offset_bits = 28 - bits_for(depth) }
        sides[key(request.address, request.qpn)] = side
        sides[key(d.src, tvb(mad + 12, 3):uint())] = side
    end
    return errno == 0 and "RTRS connection response" or string.format("RTRS rejects: error %d", errno)
end

-- A message of the connection manager.
local function connection(tvb, d, tree)
    local mad = d.at + BTH_LEN + 8
    if d.at + d.len > tvb:len() or d.len < BTH_LEN + 8 + 256 + ICRC_LEN or tvb(mad + 1, 1):uint() ~= 7 then
        return nil
    end
    local attribute = tvb(mad + 16, 2):uint()
    local magic = function(at)
        return tvb(at, 2):le_uint() == 0x1bbd
    end
    if attribute == 0x10 then
        -- Behind the header of RDMA_CM, and two bytes that belong to that with other addresses.
        local at = mad + MAD_HEADER + 140 + 36
        return magic(at + 2) and rtrs_request(tvb, at, d, tree) or nil
    elseif attribute == 0x13 or attribute == 0x12 then
        local at = mad + MAD_HEADER + (attribute == 0x13 and 36 or 84)
        return magic(at) and rtrs_reply(tvb, at, d, tree) or nil
    end
    return nil
end

-- RNBD

local OPERATIONS = {
    [0] = "read", [1] = "write", [2] = "flush", [3] = "discard", [4] = "secure erase", [5] = "write zeroes",
    [0xba] = "block status",
}
local ACCESS = { [0] = "ro", [1] = "rw", [2] = "migration" }
local LENGTHS = { [0] = 36, [1] = 36, [2] = 264, [3] = 56, [4] = 32, [5] = 8 }
-- Request messages before protocol version 2 are shorter.
local IO_LEN_V1 = 24

local function rnbd(tvb, at, len, tree)
    if len < 4 then
        return nil
    end
    local kind = tvb(at, 2):le_uint()
    if LENGTHS[kind] ~= len and not (kind == 4 and len == IO_LEN_V1) then
        return nil
    end
    local named = function(name)
        return tree:add(fields.rnbd_type, tvb(at, len), name)
    end
    if kind == 0 or kind == 1 then
        local name = kind == 0 and "session info" or "session info response"
        named(name):add(fields.rnbd_version, tvb(at + 4, 1))
        return "RNBD " .. name
    elseif kind == 2 then
        local subtree, name = named("open"), tvb(at + 6, 255):stringz()
        subtree:add(fields.rnbd_access, tvb(at + 4, 1), ACCESS[tvb(at + 4, 1):uint()] or "unknown")
        subtree:add(fields.rnbd_name, tvb(at + 6, 255), name)
        return "RNBD open " .. name
    elseif kind == 3 then
        local subtree = named("open response")
        subtree:add_le(fields.rnbd_device, tvb(at + 4, 4))
        subtree:add_le(fields.rnbd_sectors, tvb(at + 8, 8))
        return string.format("RNBD open response, device %d", tvb(at + 4, 4):le_uint())
    elseif kind == 5 then
        named("close"):add_le(fields.rnbd_device, tvb(at + 4, 4))
        return string.format("RNBD close, device %d", tvb(at + 4, 4):le_uint())
    end
    local subtree, rw = named("I/O"), tvb(at + 16, 4):le_uint()
    local op = OPERATIONS[band(rw, 0xff)] or "unknown"
    subtree:add_le(fields.rnbd_device, tvb(at + 4, 4))
    subtree:add_le(fields.rnbd_lba, tvb(at + 8, 8))
    subtree:add(fields.rnbd_op, tvb(at + 16, 4), op)
    subtree:add(fields.rnbd_sync, tvb(at + 16, 4), band(rw, 0x100) ~= 0)
    subtree:add(fields.rnbd_fua, tvb(at + 16, 4), band(rw, 0x200) ~= 0)
    subtree:add(fields.rnbd_preflush, tvb(at + 16, 4), band(rw, 0x400) ~= 0)
    subtree:add_le(fields.rnbd_bytes, tvb(at + 20, 4))
    if len > IO_LEN_V1 then
        subtree:add_le(fields.rnbd_prio, tvb(at + 24, 2))
    end
    local lba = tvb(at + 8, 8):le_uint64()
    return string.format("RNBD %s, sector %s, %d bytes", op, tostring(lba), tvb(at + 20, 4):le_uint())
end

-- RTRS

-- The request at the end of a WRITE with `len` bytes of payload at `at`. Returns where it is, and its length.
local function find_request(tvb, at, len)
    for _, size in ipairs({ 24, 8, 4 }) do
        if len >= size then
            local message = at + len - size
            local kind, usr_len = tvb(message, 2):le_uint(), tvb(message + 2, 2):le_uint()
            local fits
            if size == 4 then
                fits = kind == 2
            else
                fits = kind == 3 and tvb(message + 6, 2):le_uint() == (size - 8) / 16
            end
            if fits and usr_len <= len - size then
                return message, size, usr_len
            end
        end
    end
    return nil
end

local function rtrs_io(tvb, at, len, payload, side, tree)
    local message, size, usr_len = find_request(tvb, at, len)
    local user = message and rnbd(tvb, message - usr_len, usr_len, tree)
    if not side and not user then
        return nil
    end
    local name = message and (size == 4 and "write request" or "read request") or "request"
    local subtree = tree:add(fields.rtrs_type, message and tvb(message, size) or tvb(at, len), name)
    local permit = ""
    if side then
        local unit = 2 ^ side.offset_bits
        local chunk = math.floor(payload / unit)
        subtree:add(fields.rtrs_permit, chunk)
        subtree:add(fields.rtrs_offset, payload % unit)
        permit = string.format(", permit %d", chunk)
    end
    if message then
        subtree:add_le(fields.rtrs_usr_len, tvb(message + 2, 2))
    end
    if size == 24 or size == 8 then
        subtree:add_le(fields.rtrs_sg_count, tvb(message + 6, 2))
    end
    if size == 24 then
        subtree:add_le(fields.rtrs_sg_addr, tvb(message + 8, 8))
        subtree:add_le(fields.rtrs_sg_key, tvb(message + 16, 4))
        subtree:add_le(fields.rtrs_sg_len, tvb(message + 20, 4))
    end
    return "RTRS " .. name .. permit .. (user and (": " .. user) or "")
end

local function rtrs_key(tvb, at, len, tree)
    if len == 8 and tvb(at, 2):le_uint() == 4 then
        local subtree = tree:add(fields.rtrs_type, tvb(at, 8), "new key")
        subtree:add_le(fields.rtrs_permit, tvb(at + 2, 2))
        subtree:add_le(fields.rtrs_sg_key, tvb(at + 4, 4))
    end
end

local function rtrs_immediate(tvb, d, imm, at, len, side, tree)
    local value = tvb(imm, 4):uint()
    local kind, payload = rshift(value, 28), band(value, 0x0fffffff)
    if kind == 0 then
        return rtrs_io(tvb, at, len, payload, side, tree)
    elseif not side then
        return nil
    elseif kind == 1 or kind == 2 then
        local errno, permit = rshift(payload, 19), band(payload, 0x7ffff)
        local subtree = tree:add(fields.rtrs_type, tvb(imm, 4), "response")
        subtree:add(fields.rtrs_permit, tvb(imm, 4), permit)
        subtree:add(fields.rtrs_errno, tvb(imm, 4), errno)
        subtree:add(fields.rtrs_invalidated, tvb(imm, 4), kind == 2)
        rtrs_key(tvb, at, len, tree)
        if errno ~= 0 then
            subtree:add_proto_expert_info(rtrs_error, string.format("RTRS error %d", errno))
        end
        return string.format("RTRS response, permit %d%s", permit, errno ~= 0 and string.format(", error %d", errno) or "")
    elseif kind == 8 or kind == 9 then
        local name = kind == 8 and "heartbeat" or "heartbeat answer"
        tree:add(fields.rtrs_type, tvb(imm, 4), name)
        return "RTRS " .. name
    end
    return nil
end

local function rtrs_send(tvb, at, len, tree)
    local kind = len >= 8 and tvb(at, 2):le_uint()
    if kind == 0 and len >= 257 then
        local name = tvb(at + 2, 255):stringz()
        local subtree = tree:add(fields.rtrs_type, tvb(at, len), "session information request")
        subtree:add(fields.rtrs_name, tvb(at + 2, 255), name)
        return "RTRS session " .. name
    elseif kind == 1 then
        local subtree = tree:add(fields.rtrs_type, tvb(at, len), "session information response")
        subtree:add_le(fields.rtrs_sg_count, tvb(at + 2, 2))
        return string.format("RTRS session information, %d chunks", tvb(at + 2, 2):le_uint())
    elseif kind == 4 then
        rtrs_key(tvb, at, len, tree)
        return "RTRS new key"
    end
    return nil
end

-- RDS: a header of 48 bytes, whose checksum leaves little doubt.
local function rds(tvb, at, len, tree)
    if len < 48 or tvb(at + 30, 2):uint() == 0 or tvb(at + 26, 4):uint() ~= 0 then
        return nil
    end
    local sum = 0
    for word = 0, 46, 2 do
        sum = sum + tvb(at + word, 2):uint()
    end
    if sum == 0 or sum % 0xffff ~= 0 then
        return nil
    end
    local flags, bytes = tvb(at + 24, 1):uint(), tvb(at + 16, 4):uint()
    local sport, dport = tvb(at + 20, 2):uint(), tvb(at + 22, 2):uint()
    local sequence = tvb(at, 8):uint64()
    local name = "data"
    if band(flags, 1) ~= 0 then
        name = "congestion map"
    elseif sequence == UInt64(0) and bytes == 0 then
        name = "acknowledgement"
    elseif bytes == 0 and dport == 0 then
        name = "ping"
    elseif bytes == 0 and sport == 0 then
        name = "pong"
    end
    local subtree = tree:add(fields.rds_type, tvb(at, 48), name)
    subtree:add(fields.rds_sequence, tvb(at, 8))
    subtree:add(fields.rds_ack, tvb(at + 8, 8))
    subtree:add(fields.rds_len, tvb(at + 16, 4))
    subtree:add(fields.rds_sport, tvb(at + 20, 2))
    subtree:add(fields.rds_dport, tvb(at + 22, 2))
    subtree:add(fields.rds_bitmap, tvb(at + 24, 1), band(flags, 1) ~= 0)
    subtree:add(fields.rds_ack_required, tvb(at + 24, 1), band(flags, 2) ~= 0)
    subtree:add(fields.rds_retransmitted, tvb(at + 24, 1), band(flags, 4) ~= 0)
    subtree:add(fields.rds_credit, tvb(at + 25, 1))
    return string.format("RDS %s %s, %d > %d, %d bytes", name, tostring(sequence), sport, dport, bytes)
end

-- The message in a packet of a reliable connection.
local function message(tvb, d, opcode, tree)
    local kind = band(opcode, 0x1f)
    local extended = EXTENDED[kind] or 0
    local at = d.at + BTH_LEN + extended
    local pad = band(rshift(tvb(d.at + 1, 1):uint(), 4), 3)
    local len = d.len - BTH_LEN - extended - ICRC_LEN - pad
    if len < 0 or d.at + d.len > tvb:len() then
        return nil
    end
    local dest = tvb(d.at + 5, 3):uint()
    local side = sides[key(d.dst, dest)]
    local imm = WITH_IMMEDIATE[kind]
    if imm then
        return rtrs_immediate(tvb, d, d.at + BTH_LEN + imm, at, len, side, tree)
    elseif side and SENDS[kind] then
        return rtrs_send(tvb, at, len, tree)
    elseif side and kind == WRITE_ONLY and (len == 36 or len == 56) then
        -- Answers; other data of these lengths is told by its type.
        local answer = tvb(at, 2):le_uint()
        return (answer == 1 or answer == 3) and rnbd(tvb, at, len, tree) or nil
    elseif SENDS[kind] then
        return rds(tvb, at, len, tree)
    end
    return nil
end

function ferroce.dissector(tvb, pinfo, root)
    local d = datagram(tvb)
    if not d or d.at + BTH_LEN > tvb:len() then
        return
    end
    local rest = tvb:len() - d.at
    local tree = root:add(ferroce, tvb(d.at, math.max(0, math.min(d.len, rest))))
    if ferroce.prefs.icrc then
        local status, expected = check_icrc(tvb, d)
        local range = expected and tvb(d.at + d.len - ICRC_LEN, ICRC_LEN) or tvb(d.at, BTH_LEN)
        local item = tree:add(fields.icrc_status, range, status)
        if status == "bad" then
            item:add(fields.icrc_expected, range, expected)
            item:add_proto_expert_info(bad_icrc)
            pinfo.cols.info:append(" [wrong ICRC]")
        end
    end
    local opcode = tvb(d.at, 1):uint()
    local summary
    if opcode == 0x64 and tvb(d.at + 5, 3):uint() == 1 then
        summary = connection(tvb, d, tree)
    elseif opcode < 0x20 then
        summary = message(tvb, d, opcode, tree)
    end
    if summary then
        tree:append_text(", " .. summary)
        pinfo.cols.info:append(" " .. summary)
    end
end

register_postdissector(ferroce)
