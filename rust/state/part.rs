//! Parts: the arrays that a state consists of, and moments that are made of them.

use std::ops::Range;

use crate::{
    error::{Error, Result},
    state::chunk::CHUNK_LEN,
    stream::{BLOCK, element::Dtype, view::Route},
};

/// Elements of the largest parameter (LAY-1 of [`layout`](super::layout)): all parts of one take
/// less than 64 B per element.
pub const NUMEL_MAX: usize = isize::MAX as usize / 64 - CHUNK_LEN;

/// One array of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its key in a state dict.
    pub name: &'static str,
    /// What it holds.
    pub dtype: Dtype,
    /// Elements of the parameter that one entry stands for.
    elements: usize,
    /// Whether the last block has all its entries, also where the parameter ends within it.
    is_padded: bool,
}

impl Part {
    /// One entry for each element.
    #[must_use]
    pub const fn per_element(name: &'static str, dtype: Dtype) -> Self {
        Self::per(1, name, dtype)
    }

    /// One entry for so many elements, a divisor of [`CHUNK_LEN`].
    #[must_use]
    pub const fn per(elements: usize, name: &'static str, dtype: Dtype) -> Self {
        assert!(CHUNK_LEN.is_multiple_of(elements));
        Self { name, dtype, elements, is_padded: false }
    }

    /// The same, with all entries of the last block, also where the parameter ends within it.
    #[must_use]
    pub const fn padded(self) -> Self {
        Self { is_padded: true, ..self }
    }

    /// Whether it has as many entries as the parameter has elements.
    #[must_use]
    pub const fn is_per_element(&self) -> bool {
        self.elements == 1 && !self.is_padded
    }

    /// Entries for `numel` elements.
    ///
    /// # Errors
    /// [`Error::Value`] for more than [`NUMEL_MAX`] elements.
    pub fn len(&self, numel: usize) -> Result<usize> {
        check_numel(numel)?;
        Ok(self.entries(numel))
    }

    /// As [`Part::len`], of no more than [`NUMEL_MAX`] elements.
    pub(super) fn entries(&self, numel: usize) -> usize {
        let covered = if self.is_padded { numel.next_multiple_of(BLOCK) } else { numel };
        covered.div_ceil(self.elements)
    }

    /// The entries of a run of elements that begins with a whole one; the last may be of elements
    /// behind the run too.
    ///
    /// # Panics
    /// If an entry, or a block of a padded part, has elements before the run.
    pub(super) fn covering(&self, elements: Range<usize>) -> Range<usize> {
        let unit = if self.is_padded { BLOCK } else { self.elements };
        assert!(elements.start.is_multiple_of(unit), "`{}` begins with the run", self.name);
        let begin = elements.start / self.elements;
        begin..begin + self.entries(elements.len())
    }

    /// The entries of chunk `index` of a parameter of `numel` elements.
    pub(super) fn range(&self, index: usize, numel: usize) -> Range<usize> {
        let len = self.entries(numel);
        let entry = |chunk: usize| (chunk * (CHUNK_LEN / self.elements)).min(len);
        entry(index)..entry(index + 1)
    }
}

/// Checks that a parameter is not too large for its state.
///
/// # Errors
/// [`Error::Value`] for more than [`NUMEL_MAX`] elements.
pub(super) fn check_numel(numel: usize) -> Result<()> {
    if numel <= NUMEL_MAX {
        return Ok(());
    }
    Err(Error::value(format!("numel is `{numel}`, expected elements whose state fits into memory")))
}

/// Moments that are made of the parts of a chunk.
pub trait HeldMoments {
    /// What they are held in.
    const PARTS: &'static [Part];

    /// The moments of a chunk whose parts are read and written as `routes` say, in the order of
    /// [`Self::PARTS`].
    ///
    /// # Safety
    /// The memory of the routes is alive as long as the moments, and nothing else uses it.
    ///
    /// # Panics
    /// If the routes are not those of the parts.
    unsafe fn open(routes: &[Route]) -> Self;
}
