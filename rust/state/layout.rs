//! What the state of a parameter consists of: its parts, their dtypes and sizes, and their places
//! in a slot of memory or in a record.
//!
//! A [`Layout`] is pure: it knows no addresses. It follows from the parameter's dtype, the kind of
//! its master, the codec of its moments and the number of elements. Everything that needs a size or
//! a name takes it from here: the check of a tensor's views, slots, records, Python's state dicts.
//!
//! - LAY-1 The sizes of all parts of a layout, padded as in a slot, add up without overflow.
//! - LAY-2 In a slot every part begins with a cache line, so that stores to it bypass the cache.

use std::ops::Range;

use crate::{
    error::{Error, Result},
    simd::prefetch::LINE_BYTES,
    state::{
        chunk::Chunk,
        codecs::{FINGERPRINTS, MasterKind, MomentsKind},
        part::{Part, check_numel},
    },
    stream::element::Dtype,
};

/// The most parts that a state has: those of q8 moments and of a split master.
pub const PARTS_MAX: usize = 6;

/// The name of the field that is the parameter itself.
const PARAM: &str = "param";

/// What a step of a parameter writes: the parameter, its state, and the rounded copy of an fp32
/// parameter where there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The parameter's dtype.
    pub param: Dtype,
    /// How its master is held.
    pub master: MasterKind,
    /// How its moments are held.
    pub moments: MomentsKind,
    /// The dtype of the 16-bit weight that is written beside an fp32 parameter. It is not state: no
    /// step reads it.
    pub weight_out: Option<Dtype>,
    numel: usize,
}

/// A part in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// What it is.
    pub part: Part,
    /// Its entries.
    pub len: usize,
    /// Where it begins in a slot, in bytes.
    pub offset: usize,
}

impl Field {
    /// Whether it is the parameter itself.
    #[must_use]
    pub fn is_param(&self) -> bool {
        self.part.name == PARAM
    }

    /// Its bytes, without padding.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        self.len * self.part.dtype.size()
    }

    /// Where the next one begins.
    fn end(&self) -> usize {
        self.offset + self.nbytes().next_multiple_of(LINE_BYTES)
    }
}

impl Layout {
    /// The layout of a parameter of `numel` elements.
    ///
    /// # Errors
    /// [`Error::Value`] for moments that cannot be beside a parameter without a master, or too many
    /// elements.
    pub fn new(
        param: Dtype,
        master: MasterKind,
        moments: MomentsKind,
        weight_out: Option<Dtype>,
        numel: usize,
    ) -> Result<Self> {
        check_numel(numel)?;
        let is_plain = master == MasterKind::Plain16;
        if is_plain != (moments == MomentsKind::Nearest16) && moments != MomentsKind::Float32 {
            return Err(Error::value(format!(
                "the moments `{}` are given for a `{param}` parameter without a master, expected \
                 exp_avg and exp_avg_sq in float32 or {param}\nhint: give trailing bits or a \
                 master",
                moments.name(),
            )));
        }
        Ok(Self { param, master, moments, weight_out, numel })
    }

    /// Elements of the parameter.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// The layout of one of its chunks.
    #[must_use]
    pub fn chunk(&self, index: usize) -> Self {
        Self { numel: Chunk { tensor: 0, index }.range(self.numel).len(), ..*self }
    }

    /// The layout of a run of `numel` of its elements.
    #[must_use]
    pub fn elements(&self, numel: usize) -> Self {
        Self { numel, ..*self }
    }

    /// The entries of the field's part that belong to chunk `index`.
    #[must_use]
    pub fn chunk_range(&self, field: &Field, index: usize) -> Range<usize> {
        field.part.range(index, self.numel)
    }

    /// The entries of the field's part that a run of elements takes.
    ///
    /// # Panics
    /// If one of them, or a block of a padded part, has elements before the run.
    #[must_use]
    pub fn run_range(&self, field: &Field, elements: Range<usize>) -> Range<usize> {
        field.part.covering(elements)
    }

    /// The parts of the state: of the moments, then of the master.
    pub fn parts(&self) -> impl Iterator<Item = &'static Part> + use<> {
        self.moments.parts(self.param).iter().chain(self.master.parts())
    }

    /// All that a step writes, in the order of a slot: the parameter, the state's parts, the 16-bit
    /// weight.
    pub fn fields(&self) -> impl Iterator<Item = Field> + use<> {
        let numel = self.numel;
        let weight_out = self.weight_out.map(|dtype| Part::per_element("weight_out", dtype));
        std::iter::once(Part::per_element(PARAM, self.param))
            .chain(self.parts().copied())
            .chain(weight_out)
            .scan(0, move |offset, part| {
                let field = Field { part, len: part.entries(numel), offset: *offset };
                *offset = field.end();
                Some(field)
            })
    }

    /// Whether the parameter is a master that the model does not compute with, but with the rounded
    /// copy of it. Then it is state, as its moments are.
    #[must_use]
    pub fn has_master_in_param(&self) -> bool {
        self.weight_out.is_some()
    }

    /// The dtype of what the model computes with.
    #[must_use]
    pub fn weight(&self) -> Dtype {
        self.weight_out.unwrap_or(self.param)
    }

    /// Where a field begins in a record, in bytes. A record holds the state: the moments and the
    /// master. None: the field stays beside it, in host memory: the weight, which is the parameter
    /// or its rounded copy, and the fingerprints, of which one chunk has 4 B.
    #[must_use]
    pub fn record_offset(&self, field: &Field) -> Option<usize> {
        if self.has_master_in_param() && field.is_param() {
            return Some(0);
        }
        let is_state = self.parts().any(|part| part.name == field.part.name);
        let first = self.fields().next();
        let begin = first.filter(|_| !self.has_master_in_param()).map_or(0, |param| param.end());
        (is_state && field.part.name != FINGERPRINTS).then(|| field.offset - begin)
    }

    /// Where in a record the fp32 master begins whose rounded copy the weight is, in bytes. None: a
    /// record has no such master, and the weight does not follow from it.
    #[must_use]
    pub fn record_master_offset(&self) -> Option<usize> {
        let is_shadowed = self.master == MasterKind::Shadowed;
        let is_master = |field: &Field| match self.has_master_in_param() {
            true => field.is_param(),
            false => is_shadowed && self.master.parts().contains(&field.part),
        };
        self.record_offset(&self.fields().find(is_master)?)
    }

    /// Bytes of a record.
    #[must_use]
    pub fn record_nbytes(&self) -> usize {
        let end = |field: Field| Some(self.record_offset(&field)? + field.end() - field.offset);
        self.fields().filter_map(end).max().unwrap_or(0)
    }

    /// Bytes of a slot that holds all fields.
    #[must_use]
    pub fn slot_nbytes(&self) -> usize {
        self.fields().last().map_or(0, |field| field.end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{chunk::CHUNK_LEN, part::NUMEL_MAX};

    fn layouts(numel: usize) -> Vec<Layout> {
        let mut found = Vec::new();
        for (param, master, weight_out) in [
            (Dtype::Float32, MasterKind::Float32, None),
            (Dtype::Float32, MasterKind::Float32, Some(Dtype::BFloat16)),
            (Dtype::BFloat16, MasterKind::Split { has_fingerprints: true }, None),
            (Dtype::BFloat16, MasterKind::Split { has_fingerprints: false }, None),
            (Dtype::Float16, MasterKind::Shadowed, None),
            (Dtype::BFloat16, MasterKind::Plain16, None),
        ] {
            for moments in MomentsKind::ALL.iter().copied().chain([MomentsKind::Nearest16]) {
                found.extend(Layout::new(param, master, moments, weight_out, numel));
            }
        }
        found
    }

    #[test]
    fn chunks_have_what_the_whole_has_and_nothing_twice() {
        for numel in [0, 1, 63, 64, CHUNK_LEN - 1, CHUNK_LEN, CHUNK_LEN + 1, 3 * CHUNK_LEN + 70] {
            let found = layouts(numel);
            assert_eq!(found.len(), 5 * 3 + 2);
            for layout in found {
                assert!(layout.parts().count() <= PARTS_MAX);
                for (place, field) in layout.fields().enumerate() {
                    let mut next = 0;
                    for index in 0..numel.div_ceil(CHUNK_LEN) {
                        let range = layout.chunk_range(&field, index);
                        let of_chunk = layout.chunk(index).fields().nth(place).expect("the same");
                        assert_eq!((range.start, range.len()), (next, of_chunk.len));
                        assert_eq!(of_chunk.part, field.part);
                        next = range.end;
                    }
                    assert_eq!(next, field.len, "{numel} elements: {field:?}");
                }
            }
        }
    }

    #[test]
    fn fields_of_a_slot_begin_with_lines_and_lie_apart() {
        for layout in layouts(CHUNK_LEN - 7) {
            let mut end = 0;
            for field in layout.fields() {
                assert!(field.offset.is_multiple_of(LINE_BYTES) && field.offset >= end);
                end = field.offset + field.nbytes();
            }
            assert!(layout.slot_nbytes() >= end && layout.slot_nbytes() < end + LINE_BYTES);
        }
    }

    #[test]
    fn records_hold_the_state_alone_without_gaps_of_a_line() {
        for layout in layouts(CHUNK_LEN - 7) {
            let mut end = 0;
            for field in layout.fields() {
                let weight = if layout.weight_out.is_some() { "weight_out" } else { PARAM };
                let stays = [weight, FINGERPRINTS].contains(&field.part.name);
                let offset = layout.record_offset(&field);
                assert_eq!(offset.is_none(), stays, "{field:?}");
                let Some(offset) = offset else { continue };
                assert_eq!(offset, end);
                end = (offset + field.nbytes()).next_multiple_of(LINE_BYTES);
            }
            assert_eq!(layout.record_nbytes(), end);
        }
    }

    #[test]
    fn sizes_do_not_wrap_around() {
        for numel in [NUMEL_MAX + 1, usize::MAX] {
            assert!(layouts(numel).is_empty());
            for part in MomentsKind::Q8.parts(Dtype::Float32) {
                assert!(part.len(numel).is_err());
            }
        }
        for layout in layouts(NUMEL_MAX) {
            assert!(layout.slot_nbytes() <= isize::MAX as usize);
        }
    }
}
