//! Dense runs of elements that the caller owns, described by address: how tensors cross the
//! boundary.
//!
//! A [`View`] is checked when it is made (address, alignment, extent) and turned into slices only
//! in [`View::slice`] and [`View::slice_mut`]. The caller that hands views in vouches that the
//! memory is alive and that no other thread uses it meanwhile. That no two views of a call overlap
//! where one is written is checked ([`check_disjoint`]). A [`Route`] is a view that is read and one
//! that is written.

use std::ops::Range;

use crate::{
    error::{Error, Result},
    stream::{
        cursor::Cursor,
        element::{Dtype, Lane},
    },
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
            return Err(Error::value(format!(
                "address is `0` for {numel} elements of {dtype}, expected their memory"
            )));
        }
        let align = align(dtype);
        if !address.is_multiple_of(align) {
            return Err(Error::value(format!(
                "address is `{address:#x}` for {dtype}, expected a multiple of {align}"
            )));
        }
        if !fits(address, dtype, numel) {
            return Err(Error::value(format!(
                "numel is `{numel}`, expected elements that fit into memory"
            )));
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

    /// Bytes.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        self.numel * self.dtype.size()
    }

    fn bytes(&self) -> Range<usize> {
        self.address..self.address + self.nbytes()
    }

    /// The elements `range`, as a view of their own.
    ///
    /// # Panics
    /// If the range is not within the view, or is not aligned as a view must be.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.numel);
        let address = self.address + range.start * self.dtype.size();
        assert!(address.is_multiple_of(align(self.dtype)));
        Self { address, numel: range.len(), ..*self }
    }

    /// Its bytes as elements of `dtype`.
    ///
    /// # Panics
    /// If it does not hold whole elements, aligned as [`View::new`] wants them.
    #[must_use]
    pub fn cast(&self, dtype: Dtype) -> Self {
        let size = dtype.size();
        assert!(self.nbytes().is_multiple_of(size) && self.address.is_multiple_of(align(dtype)));
        Self { address: self.address, dtype, numel: self.nbytes() / size }
    }

    /// A run of `numel` elements of its dtype from `address` on, of which some may not be there:
    /// parts of it that are there may be taken.
    #[must_use]
    pub fn widened(&self, address: usize, numel: usize) -> Self {
        Self { address, numel, ..*self }
    }

    /// As many elements of its dtype from `address` on.
    ///
    /// # Panics
    /// If the address is not as [`View::new`] wants it.
    #[must_use]
    pub fn at(&self, address: usize) -> Self {
        assert!(address.is_multiple_of(align(self.dtype)));
        assert!(fits(address, self.dtype, self.numel), "the elements fit into memory");
        Self { address, ..*self }
    }

    /// Checks that it holds `numel` elements of one of `dtypes`; `name` is for the message.
    ///
    /// # Errors
    /// [`Error::Value`] naming what it holds and what was expected.
    pub fn expect(&self, name: &str, dtypes: &[Dtype], numel: usize) -> Result<()> {
        if !dtypes.contains(&self.dtype) {
            let names: Vec<&str> = dtypes.iter().map(|dtype| dtype.name()).collect();
            return Err(Error::value(format!(
                "{name} is `{}`, expected {}",
                self.dtype,
                names.join(" or ")
            )));
        }
        if self.numel != numel {
            return Err(Error::value(format!(
                "{name} has `{}` elements, expected {numel}",
                self.numel
            )));
        }
        Ok(())
    }

    /// The elements `range`, read-only.
    ///
    /// # Safety
    /// The memory is alive for `'a`, and nothing writes to the range meanwhile.
    ///
    /// # Panics
    /// If the range is not within the view, or `T` is not as wide as its dtype.
    #[must_use]
    pub unsafe fn slice<'a, T: Lane>(&self, range: Range<usize>) -> &'a [T] {
        let pointer = self.pointer::<T>(&range);
        // SAFETY: `pointer` checked the range; it is aligned (checked by `new` for the dtype's
        // width, which is T's), and the caller vouches for the memory.
        unsafe { std::slice::from_raw_parts(pointer, range.len()) }
    }

    /// The elements `range`.
    ///
    /// # Safety
    /// The memory is alive for `'a`, and nothing else reads or writes the range meanwhile.
    ///
    /// # Panics
    /// As [`View::slice`].
    #[must_use]
    pub unsafe fn slice_mut<'a, T: Lane>(&self, range: Range<usize>) -> &'a mut [T] {
        let pointer = self.pointer::<T>(&range);
        // SAFETY: as in `slice`; the caller vouches that there is no other access.
        unsafe { std::slice::from_raw_parts_mut(pointer, range.len()) }
    }

    /// The codes of 8 bits as words of four, read-only.
    ///
    /// # Safety
    /// As [`View::slice`].
    ///
    /// # Panics
    /// If it does not hold whole words of bytes.
    #[must_use]
    pub unsafe fn words<'a>(&self) -> &'a [u32] {
        let (pointer, len) = self.words_pointer();
        // SAFETY: the words are the view's, aligned as `new` checked; the caller vouches for the
        // memory.
        unsafe { std::slice::from_raw_parts(pointer, len) }
    }

    /// The codes of 8 bits as words of four.
    ///
    /// # Safety
    /// As [`View::slice_mut`].
    ///
    /// # Panics
    /// As [`View::words`].
    #[must_use]
    pub unsafe fn words_mut<'a>(&self) -> &'a mut [u32] {
        let (pointer, len) = self.words_pointer();
        // SAFETY: as in `words`; the caller vouches that there is no other access.
        unsafe { std::slice::from_raw_parts_mut(pointer, len) }
    }

    /// Copies all elements to `to`.
    ///
    /// # Safety
    /// Both memories are alive and disjoint. Meanwhile nothing else writes this one, or uses the
    /// other.
    ///
    /// # Panics
    /// If `to` holds another number of elements, or of another dtype.
    pub unsafe fn copy_to(&self, to: Self) {
        assert!(self.dtype == to.dtype && self.numel == to.numel);
        let (from, to) = (
            std::ptr::with_exposed_provenance::<u8>(self.address),
            std::ptr::with_exposed_provenance_mut(to.address),
        );
        // SAFETY: both hold as many bytes; the caller vouches for the memory.
        unsafe { std::ptr::copy_nonoverlapping(from, to, self.nbytes()) };
    }

    fn words_pointer(&self) -> (*mut u32, usize) {
        assert!(self.dtype == Dtype::Uint8 && self.numel.is_multiple_of(4));
        if self.numel == 0 {
            return (std::ptr::NonNull::dangling().as_ptr(), 0);
        }
        (std::ptr::with_exposed_provenance_mut(self.address), self.numel / 4)
    }

    fn pointer<T: Lane>(&self, range: &Range<usize>) -> *mut T {
        assert!(
            size_of::<T>() == self.dtype.size()
                && range.start <= range.end
                && range.end <= self.numel
        );
        if range.is_empty() {
            return std::ptr::NonNull::dangling().as_ptr();
        }
        std::ptr::with_exposed_provenance_mut::<T>(self.address).wrapping_add(range.start)
    }
}

/// Where elements are read and where they are written: the same view, or disjoint ones of the same
/// dtype and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// What is read.
    pub from: View,
    /// What is written.
    pub to: View,
}

impl Route {
    /// Elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.to.numel
    }

    /// Whether what is read is what is written.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        self.from == self.to
    }

    /// The elements as a kernel takes them.
    ///
    /// # Safety
    /// As [`View::slice`] of what is read and [`View::slice_mut`] of what is written.
    ///
    /// # Panics
    /// If `T` is not as wide as the dtype, or the sizes differ.
    #[must_use]
    pub unsafe fn cursor<'a, T: Lane>(&self) -> Cursor<'a, T> {
        // SAFETY: passed on from the caller; in place the elements are borrowed once.
        unsafe {
            let to = self.to.slice_mut(0..self.to.numel);
            if self.is_in_place() {
                Cursor::in_place(to)
            } else {
                Cursor::out_of_place(self.from.slice(0..self.from.numel), to)
            }
        }
    }

    /// The codes of 8 bits as a kernel takes them: words of four.
    ///
    /// # Safety
    /// As [`Route::cursor`].
    ///
    /// # Panics
    /// If it does not hold whole words of bytes, or the sizes differ.
    #[must_use]
    pub unsafe fn words<'a>(&self) -> Cursor<'a, u32> {
        // SAFETY: as in `cursor`.
        unsafe {
            let to = self.to.words_mut();
            if self.is_in_place() {
                Cursor::in_place(to)
            } else {
                Cursor::out_of_place(self.from.words(), to)
            }
        }
    }
}

/// What an address of elements of `dtype` is a multiple of. Codes are read four at a time.
fn align(dtype: Dtype) -> usize {
    if dtype == Dtype::Uint8 { 4 } else { dtype.size() }
}

/// Whether the elements end within what may be allocated.
fn fits(address: usize, dtype: Dtype, numel: usize) -> bool {
    let end = numel.checked_mul(dtype.size()).and_then(|bytes| address.checked_add(bytes));
    end.is_some_and(|end| isize::try_from(end).is_ok())
}

/// Checks that nothing that is written overlaps anything else that is written or read.
///
/// # Errors
/// [`Error::Value`] naming two views that overlap.
pub fn check_disjoint<'a>(
    written: impl Iterator<Item = (&'a str, View)>,
    read: impl Iterator<Item = (&'a str, View)>,
) -> Result<()> {
    Extents::default().check_disjoint(written, read)
}

/// As [`check_disjoint`], in memory that is kept from call to call.
#[derive(Debug, Default)]
pub struct Extents<'a>(Vec<Extent<'a>>);

#[derive(Debug)]
struct Extent<'a> {
    bytes: Range<usize>,
    is_written: bool,
    name: &'a str,
}

impl<'a> Extents<'a> {
    /// With room for so many views of a call.
    #[must_use]
    pub fn with_capacity(views: usize) -> Self {
        Self(Vec::with_capacity(views))
    }

    /// See [`check_disjoint`].
    ///
    /// # Errors
    /// As [`check_disjoint`].
    pub fn check_disjoint(
        &mut self,
        written: impl Iterator<Item = (&'a str, View)>,
        read: impl Iterator<Item = (&'a str, View)>,
    ) -> Result<()> {
        let extent =
            |(name, view): (_, View), is_written| Extent { bytes: view.bytes(), is_written, name };
        self.0.clear();
        self.0.extend(written.map(|view| extent(view, true)));
        self.0.extend(read.map(|view| extent(view, false)));
        self.0.retain(|extent| !extent.bytes.is_empty());
        self.0.sort_unstable_by_key(|extent| extent.bytes.start);
        // Two readers may overlap, so the furthest end of each kind is carried along.
        let (mut written_end, mut read_end) = ((0, ""), (0, ""));
        for Extent { bytes, is_written, name } in &self.0 {
            let overlapped = [written_end, if *is_written { read_end } else { (0, "") }]
                .into_iter()
                .find(|(end, _)| *end > bytes.start);
            if let Some((_, other)) = overlapped {
                return Err(Error::value(format!(
                    "{name} and {other} overlap at `{:#x}`, expected memory of their own\n\
                     hint: clone one of the tensors",
                    bytes.start
                )));
            }
            let end = if *is_written { &mut written_end } else { &mut read_end };
            if bytes.end > end.0 {
                *end = (bytes.end, name);
            }
        }
        Ok(())
    }
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
            let message =
                View::new(address, dtype, numel).expect_err("must be refused").to_string();
            assert!(message.contains(said), "{message}");
        }
        assert!(View::new(0, Dtype::Float32, 0).is_ok(), "an empty tensor has no memory");
    }

    #[test]
    fn a_route_is_in_place_where_it_is_written_where_it_is_read() {
        let (here, there) = (view(64, 3), view(128, 3));
        assert!(Route { from: here, to: here }.is_in_place());
        let apart = Route { from: here, to: there };
        assert!(!apart.is_in_place());
        assert_eq!(apart.numel(), 3);
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
        assert!(
            check(&[(200, 1)], &[(64, 100), (68, 1)]).is_err(),
            "hidden behind a shorter reader"
        );
        assert!(check(&[(64, 100), (68, 1)], &[]).is_err());
    }

    #[test]
    fn room_for_the_views_of_a_call_is_made_once() {
        let mut extents = Extents::with_capacity(3);
        let room = extents.0.capacity();
        assert!(room >= 3);
        let views = [64, 96, 128].map(|address| ("view", view(address, 4)));
        for _ in 0..2 {
            extents.check_disjoint(views.into_iter(), std::iter::empty()).expect("disjoint views");
            assert_eq!(extents.0.capacity(), room);
        }
    }
}
