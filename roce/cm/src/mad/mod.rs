//! Management datagrams of communication management.
/// Bytes of a MAD.
pub const MAD_LEN: usize = 256;
/// Attribute IDs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
#[allow(missing_docs)]
pub enum Attribute {
    Req = 0x10,
    Mra = 0x11,
    Rej = 0x12,
    Rep = 0x13,
    Rtu = 0x14,
    Dreq = 0x15,
    Drep = 0x16,
    SidrReq = 0x17,
    SidrRep = 0x18,
}
impl Attribute {
    /// How many.
    pub const COUNT: usize = 9;
    pub(crate) const fn index(self) -> usize {
        self as usize - 0x10
    }
}
