//! Arithmetic in GF(2)[x] modulo the CRC-32 polynomial, in the reflected representation of the CRC register: bit 31
//! is the coefficient of x^0.
//!
//! Feeding a zero byte to a CRC register (without the inversions at both ends) multiplies it by x^8, so going back n
//! zero bytes is one multiplication by x^(-8n).

/// The CRC-32 polynomial x^32 + x^26 + … + 1, reflected, without its x^32.
const POLY: u32 = 0xedb8_8320;
/// x^0.
const ONE: u32 = 1 << 31;

/// `a · b` modulo the polynomial.
pub(crate) const fn mul(a: u32, b: u32) -> u32 {
    let mut product = 0;
    let mut shifted = b;
    let mut i = 0;
    while i < 32 {
        // Masks instead of branches: the bits are as good as random, and a mispredicted branch costs more.
        product ^= shifted & 0u32.wrapping_sub((a >> (31 - i)) & 1);
        shifted = (shifted >> 1) ^ (POLY & 0u32.wrapping_sub(shifted & 1));
        i += 1;
    }
    product
}

/// x^(-1): multiplied by x it gives 1.
const X_INVERSE: u32 = (POLY << 1) | 1;

/// x^(-8·2^k) at index k.
const INVERSE_BYTES: [u32; 32] = {
    let mut table = [0; 32];
    let mut power = mul(X_INVERSE, X_INVERSE);
    power = mul(power, power);
    power = mul(power, power);
    let mut k = 0;
    while k < 32 {
        table[k] = power;
        power = mul(power, power);
        k += 1;
    }
    table
};

/// x^(8n): feeds `n` zero bytes.
pub(crate) const fn zero_bytes(n: usize) -> u32 {
    let mut factor = ONE;
    let mut i = 0;
    while i < n {
        // x^8.
        factor = mul(factor, ONE >> 8);
        i += 1;
    }
    factor
}

/// x^(-8n): undoes `n` zero bytes.
pub(crate) const fn inverse_of_zero_bytes(n: u32) -> u32 {
    let mut factor = ONE;
    let mut rest = n;
    while rest != 0 {
        factor = mul(factor, INVERSE_BYTES[rest.trailing_zeros() as usize]);
        rest &= rest - 1;
    }
    factor
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One zero byte through the register, bit by bit.
    fn zero_byte(mut state: u32) -> u32 {
        for _ in 0..8 {
            state = if state & 1 != 0 {
                (state >> 1) ^ POLY
            } else {
                state >> 1
            };
        }
        state
    }

    #[test]
    fn one_is_neutral_and_x_has_its_inverse() {
        assert_eq!(mul(ONE, 0x1234_5678), 0x1234_5678);
        assert_eq!(mul(0x1234_5678, ONE), 0x1234_5678);
        assert_eq!(mul(ONE >> 1, X_INVERSE), ONE);
    }

    #[test]
    fn going_back_undoes_zero_bytes_one_by_one() {
        let start = 0xdead_beef;
        let mut state = start;
        for n in 0..5000 {
            assert_eq!(mul(state, inverse_of_zero_bytes(n)), start, "after {n} zero bytes");
            if n < 50 {
                assert_eq!(mul(start, zero_bytes(n as usize)), state, "{n} zero bytes");
            }
            state = zero_byte(state);
        }
    }
}
