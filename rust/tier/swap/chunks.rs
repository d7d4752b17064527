//! Which chunks a swap has, where each one's state is, and which records are its.
//!
//! Chunks are numbered through, tensor after tensor. The first ones are in host memory. Records are
//! numbered alike: with [`Durability::None`] those of the other chunks' state; with
//! [`Durability::Commit`] the state of all chunks, then the weights that do not follow from it,
//! then the catalog. A weight that is the rounded copy of an fp32 master has no record, unless that
//! is packed (`packed.rs`).

use super::{super::volume::Durability, catalog, packed};
use crate::{
    adam::tensor::AdamTensor,
    error::{Error, Result},
    state::{
        chunk::num_chunks,
        layout::{Field, Layout},
    },
    stream::view::View,
};

/// One tensor.
#[derive(Debug)]
pub(super) struct Held {
    /// Its state, at addresses that nothing is at.
    pub(super) place: AdamTensor,
    /// The number of its first chunk.
    pub(super) first: usize,
    /// Of all records of weights, which is the first of this tensor; None: it has none.
    first_weight: Option<usize>,
    /// Whether its fp32 master is packed beside its weight.
    pub(super) is_packed: bool,
}

impl Held {
    /// The views of a tensor that its record has, but for fingerprints.
    fn in_record(tensor: &AdamTensor) -> impl Iterator<Item = View> {
        let master = tensor.layout().has_master_in_param().then_some(tensor.param);
        tensor.moments().iter().chain(tensor.master()).copied().chain(master)
    }

    /// Where in its record a field of a chunk with this layout begins, in bytes; of a packed master
    /// where that begins. None: it stays beside the record.
    pub(super) fn record_offset(&self, layout: &Layout, field: &Field) -> Option<usize> {
        let offset = layout.record_offset(field)?;
        Some(if self.packs(field) { offset } else { offset - self.saved_nbytes(layout) })
    }

    /// Whether a field is a master that is packed. It is the first of its record.
    pub(super) fn packs(&self, field: &Field) -> bool {
        self.is_packed && field.is_param()
    }

    /// Where in a record the fp32 master begins from which the weight follows, in bytes.
    pub(super) fn record_master_offset(&self, layout: &Layout) -> Option<usize> {
        layout.record_master_offset().filter(|_| !self.is_packed)
    }

    fn record_nbytes(&self, layout: &Layout) -> usize {
        layout.record_nbytes() - self.saved_nbytes(layout)
    }

    fn saved_nbytes(&self, layout: &Layout) -> usize {
        if self.is_packed { packed::saved_nbytes(layout.numel()) } else { 0 }
    }

    /// Whether the tensor names the place, and no other memory.
    pub(super) fn is_placed(&self, tensor: &AdamTensor) -> bool {
        tensor.moments()[0] == self.place.moments()[0]
    }

    /// Checks that a tensor has the state that this has, all of it in one place.
    pub(super) fn check(&self, tensor: &AdamTensor) -> Result<()> {
        let [given, expected] =
            [tensor, &self.place].map(|one| *one.without_fingerprints().layout());
        if given != expected {
            return Err(Error::value(format!(
                "a tensor has the layout `{given:?}`, expected {expected:?}, as when its volume \
                 was made"
            )));
        }
        let is_placed = self.is_placed(tensor);
        let [tensor, place] = [*tensor, self.place].map(AdamTensor::without_fingerprints);
        let mut views = Self::in_record(&tensor).zip(Self::in_record(&place));
        if views.any(|(given, own)| (given == own) != is_placed) {
            return Err(Error::value(
                "some of the state of a tensor is on its volume, expected all or nothing\nhint: \
                 replace all tensors of a parameter's state, or none",
            ));
        }
        Ok(())
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Chunks {
    tensors: Box<[Held]>,
    /// For each chunk in host memory where its state begins there, and one more for the end.
    ram_offsets: Box<[usize]>,
    count: usize,
    /// Records of weights, with [`Durability::Commit`].
    weights: usize,
    durability: Durability,
}

impl Chunks {
    /// Of tensors at these places; as many of the first chunks are in host memory as have room in
    /// `ram_nbytes`. The masters of those in `packed` are packed.
    pub(super) fn new(
        places: &[AdamTensor],
        packed: &[usize],
        ram_nbytes: usize,
        durability: Durability,
    ) -> Self {
        let (mut count, mut weights) = (0, 0);
        let mut tensors = Vec::with_capacity(places.len());
        let mut ram_offsets = vec![0];
        let mut is_full = false;
        for (index, place) in places.iter().enumerate() {
            let layout = *place.without_fingerprints().layout();
            let num = num_chunks(layout.numel());
            let mut held = Held {
                place: *place,
                first: count,
                first_weight: None,
                is_packed: packed.contains(&index),
            };
            let has_weights = held.record_master_offset(&layout).is_none();
            held.first_weight = has_weights.then_some(weights);
            count += num;
            weights += if has_weights { num } else { 0 };
            for index in 0..num {
                let nbytes = held.record_nbytes(&layout.chunk(index));
                let end = ram_offsets[ram_offsets.len() - 1] + nbytes;
                is_full |= end > ram_nbytes;
                if is_full {
                    break;
                }
                ram_offsets.push(end);
            }
            tensors.push(held);
        }
        Self {
            tensors: tensors.into(),
            ram_offsets: ram_offsets.into(),
            count,
            weights,
            durability,
        }
    }

    pub(super) fn tensors(&self) -> &[Held] {
        &self.tensors
    }

    /// The layouts of the tensors, and whether their masters are packed.
    pub(super) fn layouts(&self) -> Vec<(Layout, bool)> {
        self.tensors.iter().map(|held| (*held.place.layout(), held.is_packed)).collect()
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// How many are in host memory.
    pub(super) fn in_ram(&self) -> usize {
        self.ram_offsets.len() - 1
    }

    pub(super) fn is_in_ram(&self, number: usize) -> bool {
        number < self.in_ram()
    }

    /// Where its state is in host memory; None: it is on the volume.
    pub(super) fn ram_offset(&self, number: usize) -> Option<usize> {
        self.is_in_ram(number).then(|| self.ram_offsets[number])
    }

    /// Bytes of host memory for state.
    pub(super) fn ram_nbytes(&self) -> usize {
        self.ram_offsets[self.in_ram()]
    }

    /// The tensor of a chunk, and which of its chunks it is.
    pub(super) fn of(&self, number: usize) -> (&Held, usize) {
        // Tensors without elements have the same first chunk as the one behind them.
        let tensor = self.tensors.partition_point(|held| held.first <= number) - 1;
        (&self.tensors[tensor], number - self.tensors[tensor].first)
    }

    fn layout(&self, number: usize) -> Layout {
        let (held, index) = self.of(number);
        held.place.without_fingerprints().layout().chunk(index)
    }

    /// Bytes of a chunk's state.
    pub(super) fn state_nbytes(&self, number: usize) -> usize {
        self.of(number).0.record_nbytes(&self.layout(number))
    }

    /// Bytes of a chunk's weight.
    pub(super) fn weight_nbytes(&self, number: usize) -> usize {
        let layout = self.layout(number);
        layout.numel() * layout.weight().size()
    }

    /// The record of a chunk's state; None: it has none.
    pub(super) fn record(&self, number: usize) -> Option<usize> {
        match self.durability {
            Durability::Commit => Some(number),
            Durability::None => number.checked_sub(self.in_ram()),
        }
    }

    /// The record of a chunk's weight; None: it has none.
    pub(super) fn weight_record(&self, number: usize) -> Option<usize> {
        let (held, index) = self.of(number);
        let first = held.first_weight.filter(|_| self.durability == Durability::Commit)?;
        Some(self.count + first + index)
    }

    /// The record of the catalog, with [`Durability::Commit`].
    pub(super) fn catalog_record(&self) -> usize {
        self.count + self.weights
    }

    /// Bytes of each record.
    pub(super) fn record_nbytes(&self) -> Vec<usize> {
        let numbers = 0..self.count;
        match self.durability {
            Durability::None => {
                numbers.skip(self.in_ram()).map(|number| self.state_nbytes(number)).collect()
            }
            Durability::Commit => numbers
                .clone()
                .map(|number| self.state_nbytes(number))
                .chain(
                    numbers
                        .filter(|&number| self.weight_record(number).is_some())
                        .map(|number| self.weight_nbytes(number)),
                )
                .chain([catalog::nbytes(self.tensors.len())])
                .collect(),
        }
    }
}
