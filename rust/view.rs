//! Dense runs of elements that someone else owns, described by address: how tensors cross the boundary.
//!
//! A [`View`] is checked when it is made (address, alignment, extent) and turned into slices only in [`View::slice`] and
//! [`View::slice_mut`]. Whoever hands views in vouches that the memory is alive and not used by others meanwhile; that
//! no two views of a call overlap where one is written is checked ([`check_disjoint`]).

use std::ops::Range;

use crate::{
    element::{Dtype, Lane},
    error::{Error, Result},
};

/// `numel` elements of `dtype` from `address` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    address: usize,
    dtype: Dtype,
    numel: usize,
}

impl View {
    /// Describes a run of elements.
    ///
    /// # Errors
    /// [`Error::Value`] for a null or misaligned address, or an extent beyond the address space.
    pub fn new(address: usize, dtype: Dtype, numel: usize) -> Result<Self> {
        if numel > 0 && address == 0 {
            return Err(Error::value(format!("address is `0` for {numel} elements of {dtype}, expected their memory")));
        }
        // Codes are read four at a time.
        let align = dtype.size().max(if dtype == Dtype::Uint8 { 4 } else { 1 });
        if !address.is_multiple_of(align) {
            return Err(Error::value(format!("address is `{address:#x}` for {dtype}, expected a multiple of {align}")));
        }
        let fits = numel.checked_mul(dtype.size()).and_then(|bytes| address.checked_add(bytes));
        if fits.is_none_or(|end| end > isize::MAX as usize) {
            return Err(Error::value(format!("numel is `{numel}`, expected elements that fit into memory")));
        }
        Ok(Self { address, dtype, numel })
    }

    /// Where it begins.
    #[must_use]
    pub fn address(&self) -> usize {
        self.address
    }

    /// What it holds.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.numel
    }

    fn bytes(&self) -> Range<usize> {
        self.address..self.address + self.numel * self.dtype.size()
    }

    /// Checks that it holds `numel` elements of one of `dtypes`; `name` is for the message.
    ///
    /// # Errors
    /// [`Error::Value`] naming what it holds and what was expected.
    pub fn expect(&self, name: &str, dtypes: &[Dtype], numel: usize) -> Result<()> {
        if !dtypes.contains(&self.dtype) {
            let names: Vec<&str> = dtypes.iter().map(|dtype| dtype.name()).collect();
            return Err(Error::value(format!("{name} is `{}`, expected {}", self.dtype, names.join(" or "))));
        }
        if self.numel != numel {
            return Err(Error::value(format!("{name} has `{}` elements, expected {numel}", self.numel)));
        }
        Ok(())
    }

    /// The elements `range`, read-only.
    ///
    /// # Safety
    /// The memory is alive for `'a`, and nobody writes to the range meanwhile.
    ///
    /// # Panics
    /// If the range is not within the view, or `T` is not as wide as its dtype.
    #[must_use]
    pub unsafe fn slice<'a, T: Lane>(&self, range: Range<usize>) -> &'a [T] {
        let pointer = self.pointer::<T>(&range);
        // SAFETY: `pointer` checked the range; it is aligned (checked by `new` for the dtype's width, which is T's), and
        // the caller vouches for the memory.
        unsafe { std::slice::from_raw_parts(pointer, range.len()) }
    }

    /// The elements `range`.
    ///
    /// # Safety
    /// The memory is alive for `'a`, and nobody else reads or writes the range meanwhile.
    ///
    /// # Panics
    /// As [`View::slice`].
    #[must_use]
    pub unsafe fn slice_mut<'a, T: Lane>(&self, range: Range<usize>) -> &'a mut [T] {
        let pointer = self.pointer::<T>(&range);
        // SAFETY: as in `slice`; the caller vouches that there is no other access.
        unsafe { std::slice::from_raw_parts_mut(pointer, range.len()) }
    }

    /// The codes of 8 bits as words of four: the elements `4 * range`.
    ///
    /// # Safety
    /// As [`View::slice_mut`].
    ///
    /// # Panics
    /// If the range is not within the view, or it does not hold bytes.
    #[must_use]
    pub unsafe fn words_mut<'a>(&self, range: Range<usize>) -> &'a mut [u32] {
        assert!(self.dtype == Dtype::Uint8 && range.start <= range.end && range.end * 4 <= self.numel);
        let pointer = std::ptr::with_exposed_provenance_mut::<u32>(self.address).wrapping_add(range.start);
        // SAFETY: the words are within the view, as asserted; `new` checked the alignment; the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts_mut(pointer, range.len()) }
    }

    fn pointer<T: Lane>(&self, range: &Range<usize>) -> *mut T {
        assert!(size_of::<T>() == self.dtype.size() && range.start <= range.end && range.end <= self.numel);
        if range.is_empty() {
            return std::ptr::NonNull::dangling().as_ptr();
        }
        std::ptr::with_exposed_provenance_mut::<T>(self.address).wrapping_add(range.start)
    }
}

/// Checks that nothing that is written overlaps anything else that is written or read.
///
/// # Errors
/// [`Error::Value`] naming two views that overlap.
pub fn check_disjoint<'a>(
    written: impl Iterator<Item = (&'a str, View)>,
    read: impl Iterator<Item = (&'a str, View)>,
) -> Result<()> {
    let mut extents: Vec<(Range<usize>, bool, &str)> = written
        .map(|(name, view)| (view.bytes(), true, name))
        .chain(read.map(|(name, view)| (view.bytes(), false, name)))
        .filter(|(bytes, ..)| !bytes.is_empty())
        .collect();
    extents.sort_unstable_by_key(|(bytes, ..)| bytes.start);
    // Two readers may overlap, so the furthest end of each kind is carried along.
    let (mut written_end, mut read_end) = ((0, ""), (0, ""));
    for (bytes, is_written, name) in extents {
        let mut previous = vec![written_end];
        if is_written {
            previous.push(read_end);
        }
        if let Some((_, other)) = previous.into_iter().find(|(end, _)| *end > bytes.start) {
            return Err(Error::value(format!(
                "{name} and {other} overlap at `{:#x}`, expected memory of their own\nhint: clone one of the tensors",
                bytes.start
            )));
        }
        let end = if is_written { &mut written_end } else { &mut read_end };
        if bytes.end > end.0 {
            *end = (bytes.end, name);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(address: usize, numel: usize) -> View {
        View::new(address, Dtype::Float32, numel).expect("a valid view")
    }

    #[test]
    fn views_are_checked_when_made() {
        for (address, dtype, numel, said) in [
            (0, Dtype::Float32, 1, "`0`"),
            (2, Dtype::Float32, 1, "multiple of 4"),
            (2, Dtype::Uint8, 1, "multiple of 4"),
            (8, Dtype::Float32, usize::MAX / 2, "fit"),
        ] {
            let message = View::new(address, dtype, numel).expect_err("must be refused").to_string();
            assert!(message.contains(said), "{message}");
        }
        assert!(View::new(0, Dtype::Float32, 0).is_ok(), "an empty tensor has no memory");
    }

    #[test]
    fn overlaps_are_found_unless_both_only_read() {
        let check = |written: &[(usize, usize)], read: &[(usize, usize)]| {
            check_disjoint(
                written.iter().map(|&(address, numel)| ("written", view(address, numel))),
                read.iter().map(|&(address, numel)| ("read", view(address, numel))),
            )
        };
        assert!(check(&[(64, 16), (128, 16)], &[(192, 4), (192, 4), (196, 1)]).is_ok());
        assert!(check(&[(64, 17), (128, 16)], &[]).is_err());
        assert!(check(&[(64, 16)], &[(124, 1)]).is_err());
        assert!(check(&[(200, 1)], &[(64, 100), (68, 1)]).is_err(), "hidden behind a shorter reader");
        assert!(check(&[(64, 100), (68, 1)], &[]).is_err());
    }
}
