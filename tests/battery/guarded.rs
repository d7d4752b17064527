//! Memory whose surroundings are watched.

use stepwell::stream::{
    element::{Bf16, Dtype, F16, Lane},
    view::View,
};

const GUARD: u8 = 0xa5;
/// Guard bytes before and after: more than the widest store.
const GUARD_BYTES: usize = 128;
const LINE_BYTES: usize = 64;

/// `numel` elements that begin `offset` elements after a multiple of 64 bytes, between guard bytes.
#[derive(Debug)]
pub(crate) struct Guarded {
    bytes: Vec<u8>,
    begin: usize,
    dtype: Dtype,
    numel: usize,
}

fn has_width<T>(dtype: Dtype) -> bool {
    size_of::<T>() == dtype.size()
}

impl Guarded {
    /// Zeros. Codes of 8 bits are handled four at a time, so their offset counts words.
    pub(crate) fn zeros(dtype: Dtype, numel: usize, offset: usize) -> Self {
        let offset = offset * if dtype == Dtype::Uint8 { 4 } else { dtype.size() };
        let nbytes = numel * dtype.size();
        let mut bytes = vec![GUARD; LINE_BYTES + GUARD_BYTES + offset + nbytes + GUARD_BYTES];
        let first = bytes.as_ptr().expose_provenance() + GUARD_BYTES;
        let begin = first.next_multiple_of(LINE_BYTES) - first + GUARD_BYTES + offset;
        bytes[begin..begin + nbytes].fill(0);
        Self { bytes, begin, dtype, numel }
    }

    /// A copy that begins elsewhere.
    pub(crate) fn moved(&self, offset: usize) -> Self {
        let mut moved = Self::zeros(self.dtype, self.numel, offset);
        moved.payload_mut().copy_from_slice(self.payload());
        moved
    }

    pub(crate) fn numel(&self) -> usize {
        self.numel
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The bytes between the guards.
    pub(crate) fn payload(&self) -> &[u8] {
        &self.bytes[self.begin..self.begin + self.numel * self.dtype.size()]
    }

    pub(crate) fn payload_mut(&mut self) -> &mut [u8] {
        let (begin, nbytes) = (self.begin, self.numel * self.dtype.size());
        &mut self.bytes[begin..begin + nbytes]
    }

    pub(crate) fn view(&mut self) -> View {
        let address = self.payload_mut().as_mut_ptr().expose_provenance();
        View::new(address, self.dtype, self.numel).expect("a valid view")
    }

    pub(crate) fn slice<T: Lane>(&self) -> &[T] {
        assert!(has_width::<T>(self.dtype));
        // SAFETY: the payload holds `numel` elements of T's width, aligned by `zeros` and, as the
        // buffer never grows, for good; any bits are a T.
        unsafe { std::slice::from_raw_parts(self.payload().as_ptr().cast(), self.numel) }
    }

    pub(crate) fn slice_mut<T: Lane>(&mut self) -> &mut [T] {
        assert!(has_width::<T>(self.dtype));
        let numel = self.numel;
        // SAFETY: as in `slice`, and `&mut self` lends it.
        unsafe { std::slice::from_raw_parts_mut(self.payload_mut().as_mut_ptr().cast(), numel) }
    }

    /// Codes, four to a word.
    pub(crate) fn words(&self) -> &[u32] {
        assert!(self.dtype == Dtype::Uint8 && self.numel.is_multiple_of(4));
        // SAFETY: as in `slice`; an offset of codes is a multiple of four.
        unsafe { std::slice::from_raw_parts(self.payload().as_ptr().cast(), self.numel / 4) }
    }

    pub(crate) fn words_mut(&mut self) -> &mut [u32] {
        assert!(self.dtype == Dtype::Uint8 && self.numel.is_multiple_of(4));
        let words = self.numel / 4;
        // SAFETY: as in `words`, and `&mut self` lends it.
        unsafe { std::slice::from_raw_parts_mut(self.payload_mut().as_mut_ptr().cast(), words) }
    }

    /// The floating-point value of element `index`.
    pub(crate) fn value(&self, index: usize) -> f32 {
        match self.dtype {
            Dtype::Float32 => self.slice::<f32>()[index],
            Dtype::BFloat16 => half::bf16::from_bits(self.slice::<Bf16>()[index].0).to_f32(),
            Dtype::Float16 => half::f16::from_bits(self.slice::<F16>()[index].0).to_f32(),
            dtype => panic!("{dtype} is no floating-point type"),
        }
    }

    /// Sets element `index` to the nearest representable value.
    pub(crate) fn set_value(&mut self, index: usize, value: f32) {
        match self.dtype {
            Dtype::Float32 => self.slice_mut::<f32>()[index] = value,
            Dtype::BFloat16 => {
                self.slice_mut::<Bf16>()[index] = Bf16(half::bf16::from_f32(value).to_bits())
            }
            Dtype::Float16 => {
                self.slice_mut::<F16>()[index] = F16(half::f16::from_f32(value).to_bits())
            }
            dtype => panic!("{dtype} is no floating-point type"),
        }
    }

    /// All values.
    pub(crate) fn values(&self) -> Vec<f32> {
        (0..self.numel).map(|index| self.value(index)).collect()
    }

    /// Fails where a byte before or after has been written.
    pub(crate) fn assert_guards(&self, name: &str) {
        let end = self.begin + self.numel * self.dtype.size();
        let guards = self.bytes[..self.begin].iter().chain(&self.bytes[end..]);
        assert!(
            guards.into_iter().all(|&byte| byte == GUARD),
            "{name}: written outside of its {} elements",
            self.numel
        );
    }
}
