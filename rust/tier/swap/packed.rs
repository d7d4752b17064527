//! fp32 masters in 17 bits, beside the bf16 weights that they are rounded to.
//!
//! The weight is the master rounded to nearest, ties to even. So its bits are the master's upper
//! half, or one more. What is left of a master is its lower half and whether it was rounded up.
//! Together with the weight that is the master, exactly; of a NaN it is some NaN. (`state/split.rs`
//! does it in 16 bits, with another rounding.)
//!
//! ```text
//! lower halves (2 B each) | rounded up (1 bit each) | checksum of the weights (8 B) | to 64 B
//! ```
//!
//! The weights stay in host memory, where only steps may write them. The checksum tells where
//! something else has.
//!
//! Cost: one pass over a chunk after its read, and one before its write, in the cache.

use super::Swap;
use crate::{
    error::{Error, Result},
    state::chunk::{CHUNK_LEN, Chunk},
    stream::{
        element::{Bf16, Dtype},
        view::View,
    },
};

const CHECKSUM_BYTES: usize = 8;
const LINE_BYTES: usize = 64;

/// Masters that are looked at together: their bits are whole bytes.
const GROUP: usize = 8;

fn checksum_offset(numel: usize) -> usize {
    2 * numel + numel.div_ceil(GROUP)
}

/// Bytes of so many packed masters.
pub(super) fn nbytes(numel: usize) -> usize {
    (checksum_offset(numel) + CHECKSUM_BYTES).next_multiple_of(LINE_BYTES)
}

/// Bytes that packing so many masters saves in a record.
pub(super) fn saved_nbytes(numel: usize) -> usize {
    (4 * numel).next_multiple_of(LINE_BYTES) - nbytes(numel)
}

fn checksum(weights: &[Bf16]) -> [u8; CHECKSUM_BYTES] {
    // SAFETY: any bytes are bytes.
    let (_, bytes, _) = unsafe { weights.align_to::<u8>() };
    crc_fast::crc64_nvme(bytes).to_ne_bytes()
}

/// Packs the bits of masters, as many as there are weights.
///
/// # Errors
/// [`Error::Value`] where a weight is not its rounded master.
///
/// # Panics
/// If the lengths differ.
pub(super) fn pack(masters: &[u32], weights: &[Bf16], to: &mut [u8]) -> Result<()> {
    let numel = masters.len();
    assert!(weights.len() == numel && to.len() == nbytes(numel));
    let (low, rest) = to.split_at_mut(2 * numel);
    for (low, master) in low.as_chunks_mut::<2>().0.iter_mut().zip(masters) {
        *low = (*master as u16).to_le_bytes();
    }
    // All differences of halves, in one number: a loop without branches.
    let mut found = 0;
    let groups = masters.chunks(GROUP).zip(weights.chunks(GROUP));
    for (up, (masters, weights)) in rest.iter_mut().zip(groups) {
        let mut bits = 0;
        for (bit, (&master, weight)) in masters.iter().zip(weights).enumerate() {
            let above = weight.0.wrapping_sub((master >> 16) as u16);
            found |= above;
            bits |= u8::from(above != 0) << bit;
        }
        *up = bits;
    }
    let begin = numel.div_ceil(GROUP);
    rest[begin..begin + CHECKSUM_BYTES].copy_from_slice(&checksum(weights));
    rest[begin + CHECKSUM_BYTES..].fill(0);
    let is_rounded = |(&master, weight): (&u32, &Bf16)| {
        let is_nan = master & 0x7fff_ffff > 0x7f80_0000;
        is_nan || weight.0.wrapping_sub((master >> 16) as u16) <= 1
    };
    if found <= 1 || masters.iter().zip(weights).all(is_rounded) {
        return Ok(());
    }
    Err(Error::value(
        "a weight is not the rounded master that a step has left, so the master cannot be packed",
    ))
}

/// The bits of the masters that were packed beside these weights.
///
/// # Errors
/// [`Error::Value`] where the weights are others.
///
/// # Panics
/// If the lengths differ.
pub(super) fn unpack(from: &[u8], weights: &[Bf16], masters: &mut [u32]) -> Result<()> {
    let numel = masters.len();
    assert!(weights.len() == numel && from.len() == nbytes(numel));
    let end = checksum_offset(numel);
    if from[end..end + CHECKSUM_BYTES] != checksum(weights) {
        return Err(Error::value(
            "weights in host memory were changed since the step that has left them, so their \
             masters, which are on a volume beside them, are lost\nhint: go on from a checkpoint",
        ));
    }
    let (low, ups) = from.split_at(2 * numel);
    let low = low.as_chunks::<2>().0.chunks(GROUP);
    let groups = masters.chunks_mut(GROUP).zip(weights.chunks(GROUP)).zip(low.zip(ups));
    for ((masters, weights), (low, &ups)) in groups {
        for (bit, ((master, weight), &low)) in masters.iter_mut().zip(weights).zip(low).enumerate()
        {
            let up = u16::from(ups >> bit & 1);
            let low = u16::from_le_bytes(low);
            *master = u32::from(weight.0.wrapping_sub(up)) << 16 | u32::from(low);
        }
    }
    Ok(())
}

/// Packs a master to `address`, as [`pack`].
///
/// # Safety
/// The memory is alive, and of as many elements as there are weights. Nothing else writes it, and
/// nothing else uses what is at `address`.
pub(super) unsafe fn pack_at(address: usize, weights: View, master: View) -> Result<()> {
    let numel = weights.numel();
    let to = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: passed on from the caller.
    unsafe {
        let to = std::slice::from_raw_parts_mut(to, nbytes(numel));
        pack(master.slice(0..numel), weights.slice(0..numel), to)
    }
}

/// Unpacks what is at `address` to `master`, as [`unpack`].
///
/// # Safety
/// The memory is alive, and of as many elements as there are weights. Nothing writes it, and
/// nothing else uses the master.
pub(super) unsafe fn unpack_at(address: usize, weights: View, master: View) -> Result<()> {
    let numel = weights.numel();
    let from = std::ptr::with_exposed_provenance(address);
    // SAFETY: passed on from the caller.
    unsafe {
        let from = std::slice::from_raw_parts(from, nbytes(numel));
        unpack(from, weights.slice(0..numel), master.slice_mut(0..numel))
    }
}

impl Swap {
    /// Packs the master that this worker has stepped, to where the chunk's state is.
    pub(super) fn pack(&self, number: usize, weights: View, chunk: Chunk) -> Result<()> {
        let address = match self.chunks.ram_offset(number) {
            Some(offset) => Some(self.ram.as_ptr().expose_provenance() + offset),
            None => self.pipeline().address(number),
        };
        let address = address.unwrap_or_else(|| unreachable!("it was fetched"));
        let weights = weights.part(chunk.range(weights.numel()));
        let master = View::new(scratch(), Dtype::Float32, weights.numel())?;
        // SAFETY: the worker has stepped this chunk, whose weight, buffer and own memory it alone
        // uses until the store has returned.
        unsafe { pack_at(address, weights, master) }
    }

    /// Unpacks the master of a chunk whose state is at `address`, and whose weight this is.
    ///
    /// # Safety
    /// The memory is alive. Nothing writes the weight and the state, and nothing else uses the
    /// master.
    pub(super) unsafe fn unpack(
        &self,
        number: usize,
        address: usize,
        weights: View,
        master: View,
    ) -> Result<()> {
        // SAFETY: passed on from the caller.
        unsafe { unpack_at(address, weights, master) }.map_err(|error| {
            let (held, index) = self.chunks.of(number);
            let begin = Chunk { tensor: 0, index }.range(held.place.layout().numel()).start;
            Error::value(format!(
                "{error} (volume `{}`, elements from `{begin}` on)",
                self.volume.name()
            ))
        })
    }
}

/// Masters of one chunk, as a step takes them.
#[repr(align(64))]
struct Scratch(std::cell::UnsafeCell<[u32; CHUNK_LEN]>);

thread_local! {
    static SCRATCH: Box<Scratch> =
        // Zeroed where it is made, and not moved there from the stack.
        // SAFETY: zeros are numbers.
        unsafe { Box::new_zeroed().assume_init() };
}

/// Memory of this thread's for the masters of the chunk that it steps.
pub(super) fn scratch() -> usize {
    SCRATCH.with(|scratch| scratch.0.get().expose_provenance())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// As hardware does it: to nearest, ties to even, NaN to a NaN.
    fn rounded(master: u32) -> Bf16 {
        if f32::from_bits(master).is_nan() {
            return Bf16::NAN;
        }
        Bf16(((master + 0x7fff + (master >> 16 & 1)) >> 16) as u16)
    }

    fn packed(masters: &[u32]) -> (Vec<Bf16>, Vec<u8>) {
        let weights: Vec<Bf16> = masters.iter().map(|&master| rounded(master)).collect();
        let mut to = vec![0xaa; nbytes(masters.len())];
        pack(masters, &weights, &mut to).expect("rounded");
        (weights, to)
    }

    /// All lower halves beside upper ones of both parities, signs, zeros, the largest, infinity.
    #[test]
    fn masters_come_back() {
        for high in [0x0000, 0x8000, 0x3f80, 0x3f81, 0xbf81, 0x0001, 0x7f7f, 0xff7f, 0x007f] {
            let masters: Vec<u32> = (0..1 << 16).map(|low| high << 16 | low).collect();
            let (weights, from) = packed(&masters);
            let mut found = vec![7; masters.len()];
            unpack(&from, &weights, &mut found).expect("these weights");
            assert!(found == masters, "{high:x}");
        }
        let infinite = [0x7f80_0000, 0xff80_0000];
        let (weights, from) = packed(&infinite);
        let mut found = [0; 2];
        unpack(&from, &weights, &mut found).expect("these weights");
        assert_eq!(found, infinite);
    }

    #[test]
    fn a_nan_stays_one() {
        let masters: Vec<u32> = (0..1 << 16)
            .map(|low| [0x7f80_0000, 0xff80_0000, 0x7fc0_0000, 0xffff_0000][low % 4] | low as u32)
            .filter(|&master| f32::from_bits(master).is_nan())
            .collect();
        let (weights, from) = packed(&masters);
        let mut found = vec![0; masters.len()];
        unpack(&from, &weights, &mut found).expect("these weights");
        assert!(found.iter().all(|&master| f32::from_bits(master).is_nan()));
    }

    #[test]
    fn weights_that_are_others_are_refused() {
        let masters = [0x3f80_1234; 77];
        let (mut weights, mut from) = packed(&masters);
        weights[76].0 ^= 1;
        let error = unpack(&from, &weights, &mut [0; 77]).expect_err("changed").to_string();
        assert!(error.contains("weights in host memory were changed"), "{error}");
        let weights = vec![Bf16(weights[0].0 + 2); 77];
        pack(&masters, &weights, &mut from).expect_err("not rounded");
    }

    proptest! {
        #[test]
        fn any_masters_come_back(masters in prop::collection::vec(any::<u32>(), 1..300)) {
            let masters: Vec<u32> =
                masters.into_iter().filter(|&one| !f32::from_bits(one).is_nan()).collect();
            let (weights, from) = packed(&masters);
            prop_assert!(from.len() % 64 == 0 && from.len() >= 2 * masters.len());
            let mut found = vec![0; masters.len()];
            unpack(&from, &weights, &mut found).expect("these weights");
            prop_assert_eq!(found, masters);
        }
    }
}
