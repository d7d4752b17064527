//! One thread's time per kernel: in cache, where instructions count, and from DRAM, where bytes do.
//!
//! `cargo bench --features bench` measures; `cargo test --features bench --benches` runs each once.
//! Against peers and on all cores: `python benches/adam.py`.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use stepwell::{
    adam::{
        Hyper, Step, batch,
        ceiling::{self, Streams},
        kernel::update,
        tensor::AdamTensor,
        through::{Predicted, step_chunk_through},
    },
    grads::{norm, top_k::top_k},
    host::{
        memory::{Buffer, BufferConfig},
        pool::{Pool, PoolConfig},
    },
    simd::isa::Isa,
    state::{
        Moments,
        chunk::{Chunk, num_chunks},
        codecs::MomentsKind,
        dither::Dither,
        master::Plain,
        moments::{Nearest, Stochastic},
        q8::{Coded, GROUP, Q8},
        split::{Fingerprint, Split},
    },
    stream::{
        cursor::Cursor,
        element::{Bf16, Dtype},
        view::{Route, View},
    },
    tier::revocable::HostSlots,
};

/// Elements that stay in a core's own cache, and elements that do not fit into any.
const SIZES: [(&str, usize); 2] = [("cache", 1 << 14), ("dram", 1 << 23)];

struct Arrays {
    grad: Vec<f32>,
    grad16: Vec<Bf16>,
    param: Vec<f32>,
    high: Vec<Bf16>,
    low: Vec<i16>,
    first: Vec<f32>,
    second: Vec<f32>,
    first16: Vec<Bf16>,
    second16: Vec<Bf16>,
    codes: [Vec<u32>; 2],
    scales: [Vec<Bf16>; 2],
}

impl Arrays {
    fn new(len: usize) -> Self {
        // Gradients of some 1e-2 in magnitude: bf16 bits around its exponent.
        let grad16: Vec<Bf16> = (0..len).map(|i| Bf16(0x3c00 + (i * 7919 % 256) as u16)).collect();
        Self {
            grad: grad16.iter().map(|grad| grad.to_f32()).collect(),
            grad16,
            param: vec![0.5; len],
            high: vec![Bf16(0x3f00); len],
            low: vec![0; len],
            first: vec![0.0; len],
            second: vec![0.0; len],
            first16: vec![Bf16(0); len],
            second16: vec![Bf16(0); len],
            codes: std::array::from_fn(|_| vec![0; len / 4]),
            scales: std::array::from_fn(|_| vec![Bf16(0); len / GROUP]),
        }
    }
}

fn step() -> Step {
    Step::new(&Hyper { lr: 1e-4, weight_decay: 0.01, grad_scale: 0.5, ..Hyper::default() }, 10)
}

fn fused<const Q: usize, M: Moments<Q>>(
    isa: Isa,
    grad: &[Bf16],
    high: &mut [Bf16],
    low: &mut [i16],
    moments: M,
) {
    let master = Split::new(Cursor::in_place(high), Cursor::in_place(low), false);
    update(isa, &step(), grad, master, moments, Dither::new(1, 10, 0));
}

fn adam(criterion: &mut Criterion) {
    for (place, len) in SIZES {
        let mut arrays = Arrays::new(len);
        for isa in Isa::available().filter(|isa| *isa != Isa::SCALAR) {
            let mut group = criterion.benchmark_group(format!("adam/{place}/{}", isa.name()));
            group.sample_size(20);
            let id = |name| BenchmarkId::from_parameter(name);
            let bytes = |per_element: usize| Throughput::Bytes((len * per_element) as u64);

            group.throughput(bytes(28));
            group.bench_function(id("fp32"), |bencher| {
                let Arrays { grad, param, first, second, .. } = &mut arrays;
                bencher.iter(|| {
                    let moments = Nearest::new(Cursor::in_place(first), Cursor::in_place(second));
                    update(
                        isa,
                        &step(),
                        grad,
                        Plain(Cursor::in_place(param)),
                        moments,
                        Dither::new(1, 10, 0),
                    );
                });
            });
            group.throughput(bytes(26));
            group.bench_function(id("split, fp32 moments"), |bencher| {
                let Arrays { grad16, high, low, first, second, .. } = &mut arrays;
                bencher.iter(|| {
                    fused(
                        isa,
                        grad16,
                        high,
                        low,
                        Nearest::new(Cursor::in_place(first), Cursor::in_place(second)),
                    );
                });
            });
            group.throughput(bytes(18));
            group.bench_function(id("split, bf16 moments"), |bencher| {
                let Arrays { grad16, high, low, first16, second16, .. } = &mut arrays;
                bencher.iter(|| {
                    let moments =
                        Stochastic::new(Cursor::in_place(first16), Cursor::in_place(second16));
                    fused(isa, grad16, high, low, moments);
                });
            });
            group.throughput(bytes(14));
            group.bench_function(id("split, q8 moments"), |bencher| {
                let Arrays { grad16, high, low, codes, scales, .. } = &mut arrays;
                let ([codes, codes_sq], [scales, scales_sq]) = (codes, scales);
                bencher.iter(|| {
                    let exp_avg =
                        Coded { codes: Cursor::in_place(codes), scales: Cursor::in_place(scales) };
                    let exp_avg_sq = Coded {
                        codes: Cursor::in_place(codes_sq),
                        scales: Cursor::in_place(scales_sq),
                    };
                    fused(isa, grad16, high, low, Q8 { exp_avg, exp_avg_sq });
                });
            });
            group.finish();
        }
    }
}

/// Fresh memory of these elements, which is kept in `memory`.
fn view_of(pool: &Pool, memory: &mut Vec<Buffer>, dtype: Dtype, len: usize) -> View {
    let buffer = Buffer::new(len * dtype.size(), &BufferConfig::default(), pool).expect("memory");
    let address = buffer.as_ptr().expose_provenance();
    memory.push(buffer);
    View::new(address, dtype, len).expect("a view")
}

/// A bf16 parameter, fresh, and the memory that it lies in.
fn split_tensor(
    pool: &Pool,
    len: usize,
    moments: MomentsKind,
    with_fingerprints: bool,
) -> (AdamTensor, Vec<Buffer>) {
    let mut memory = Vec::new();
    let mut view = |dtype: Dtype, len: usize| view_of(pool, &mut memory, dtype, len);
    let trailing = view(Dtype::Int16, len);
    let fingerprints = with_fingerprints.then(|| view(Dtype::Int32, num_chunks(len)));
    let mut parts = vec![("trailing", trailing)];
    parts.extend(fingerprints.map(|view| ("fingerprints", view)));
    let (param, grad) = (view(Dtype::BFloat16, len), view(Dtype::BFloat16, len));
    let moments = moments.parts(Dtype::BFloat16).iter();
    parts
        .extend(moments.map(|part| (part.name, view(part.dtype, part.len(len).expect("it fits")))));
    // SAFETY: the gradient's memory is `memory`, and nothing else uses it.
    unsafe { grad.slice_mut::<Bf16>(0..len) }.fill(Bf16(0x3c00));
    (AdamTensor::new(param, &parts, Some(grad), None, 7).expect("a tensor"), memory)
}

/// A whole step in place and out of place: the second goes to a spare slot and back in turn, each
/// time committed. And copying the state home.
fn slots(criterion: &mut Criterion) {
    let (_, len) = SIZES[1];
    let isa = Isa::available().last().expect("scalar is always there");
    let pool =
        Pool::new(&PoolConfig { threads: Some(1), ..PoolConfig::default() }).expect("a pool");
    let hyper = Hyper { lr: 1e-4, weight_decay: 0.01, grad_scale: 0.5, ..Hyper::default() };
    for (name, with_fingerprints) in
        [("split, fp32 moments", false), ("split with fingerprints, fp32 moments", true)]
    {
        let (tensor, memory) = split_tensor(&pool, len, MomentsKind::Float32, with_fingerprints);
        let mut slots = HostSlots::new(&[tensor], num_chunks(len), &pool).expect("slots");
        let mut group = criterion.benchmark_group(format!("slots/{name}"));
        group.sample_size(20);
        group.throughput(Throughput::Bytes((len * 26) as u64));
        group.bench_function("in place", |bencher| {
            bencher.iter(|| {
                // SAFETY: the tensor's memory is `memory`.
                unsafe { batch::step(&pool, isa, &[tensor], &[10], &hyper) }.expect("a step")
            });
        });
        group.bench_function("out of place", |bencher| {
            bencher.iter(|| {
                let mut revocable = slots.begin();
                // SAFETY: as above.
                unsafe { revocable.step(&pool, isa, &[(0, tensor)], &[10], &hyper) }
                    .expect("a step");
                revocable.commit();
            });
        });
        group.bench_function("out of place, then copied home", |bencher| {
            bencher.iter(|| {
                let mut revocable = slots.begin();
                // SAFETY: as above.
                unsafe { revocable.step(&pool, isa, &[(0, tensor)], &[10], &hyper) }
                    .expect("a step");
                revocable.commit();
                // SAFETY: as above.
                unsafe { slots.copy_home(&pool, &[tensor]) }.expect("copies");
            });
        });
        group.finish();
        drop(memory);
    }
}

/// Passes over all chunks with 1 to 8 gradients each, beside the time that their bytes take: on one
/// thread and on all. A step of each gradient on its own is `slots/.../in place`.
fn through(criterion: &mut Criterion) {
    let isa = Isa::available().last().expect("scalar is always there");
    let pools = [("1 thread", Some(1), SIZES[1].1), ("all threads", None, 4 * SIZES[1].1)];
    for (threads, num_threads, len) in pools {
        let pool = Pool::new(&PoolConfig { threads: num_threads, ..PoolConfig::default() })
            .expect("a pool");
        for moments in [MomentsKind::Float32, MomentsKind::Q8] {
            let (tensor, mut memory) = split_tensor(&pool, len, moments, false);
            let mut view = |dtype| view_of(&pool, &mut memory, dtype, len);
            let grads: Vec<View> = (0..8).map(|_| view(Dtype::BFloat16)).collect();
            let staged = view(Dtype::BFloat16);
            for grad in &grads {
                // SAFETY: the gradient's memory is `memory`, and nothing else uses it.
                unsafe { grad.slice_mut::<Bf16>(0..len) }.fill(Bf16(0x3c00));
            }
            let chunks = Chunk::all([len].into_iter());
            for num_grads in [1, 2, 4, 8] {
                let updates: Vec<(View, Step)> =
                    grads[..num_grads].iter().map(|&grad| (grad, step())).collect();
                let pass = |predicts: bool| {
                    pool.run(chunks.len(), &|task| {
                        let chunk = chunks[task];
                        let of_chunk = |view: View| view.part(chunk.range(len));
                        let state =
                            tensor.chunk(chunk.index).map(|_, view| Route { from: view, to: view });
                        let updates: Vec<(View, Step)> =
                            updates.iter().map(|&(grad, step)| (of_chunk(grad), step)).collect();
                        let predicted =
                            predicts.then(|| Predicted { weight: of_chunk(staged), ahead: 2.5 });
                        // SAFETY: the tensor's memory is `memory`, and no other task has the chunk.
                        unsafe { step_chunk_through(isa, &state, &updates, predicted, chunk) };
                    });
                };
                let name = format!("through/{threads}/{}, S = {num_grads}", moments.name());
                let mut group = criterion.benchmark_group(name);
                group.sample_size(20);
                // Per parameter and step.
                group.throughput(Throughput::Elements((len * num_grads) as u64));
                group.bench_function("pass", |bencher| bencher.iter(|| pass(false)));
                group.bench_function("pass, predicted", |bencher| bencher.iter(|| pass(true)));
                let is_q8 = moments == MomentsKind::Q8;
                let streams = Streams {
                    read_write: if is_q8 { vec![2, 2, 1, 1] } else { vec![2, 2, 4, 4] },
                    read: vec![2; num_grads],
                    write: vec![],
                };
                group.bench_function("ceiling", |bencher| {
                    bencher.iter_custom(|passes| {
                        ceiling::measure(&pool, isa, len, &streams, 1, passes as usize)
                            .expect("a time")
                            * passes as u32
                    });
                });
                group.finish();
            }
            drop(memory);
        }
    }
}

fn reads(criterion: &mut Criterion) {
    for (place, len) in SIZES {
        let Arrays { grad, high, .. } = Arrays::new(len);
        let mut sums = vec![0.0; len.div_ceil(norm::NORM_BLOCK)];
        for isa in Isa::available().filter(|isa| *isa != Isa::SCALAR) {
            let mut group = criterion.benchmark_group(format!("read/{place}/{}", isa.name()));
            group.sample_size(20);
            group.throughput(Throughput::Bytes((len * 4) as u64));
            group.bench_function("finite check", |bencher| {
                bencher.iter(|| norm::magnitude(isa, black_box(&grad)))
            });
            group.bench_function("finite check and norm", |bencher| {
                bencher.iter(|| norm::magnitude_and_norm(isa, black_box(&grad), &mut sums));
            });
            group.throughput(Throughput::Bytes((len * 2) as u64));
            group.bench_function("fingerprint", |bencher| {
                bencher.iter(|| isa.run(Fingerprint(black_box(&high))))
            });
            group.finish();
        }
    }
}

/// What is chosen of scores.
fn select(criterion: &mut Criterion) {
    let scores: Vec<f64> = (0..1_u64 << 20).map(|index| (index * 7919 % 65_537) as f64).collect();
    let mut group = criterion.benchmark_group("select/scores");
    group.sample_size(20);
    group.throughput(Throughput::Elements(scores.len() as u64));
    group.bench_function("top_k", |bencher| {
        bencher.iter(|| top_k(black_box(&scores), scores.len() / 10));
    });
    group.finish();
}

criterion_group!(benches, adam, slots, through, reads, select);
criterion_main!(benches);
