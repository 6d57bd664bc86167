//! Tests of the native kernels and operations, and their shared helpers.

mod attention;
mod attributes;
mod encoder;
mod heads;
mod ir;
mod length_conditions;
mod operations;
mod projections;
mod sliding_windows;
mod symbols;
mod weights;

use std::ffi::{c_int, c_void};
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};

use crate::cpu::{CpuFeatures, Isa};
use crate::kernels::Precision;
use crate::tiles::{TileSupport, tile_support};

/// A generator of numbers that depend only on the seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = server_engine::mix(self.0);
        self.0 as usize % end
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

unsafe extern "C" {
    fn ovfleet_set_thread_groups(groups: *const RawThreadGroup, count: usize);
    fn ovfleet_test_on_threads(
        threads: usize,
        body: extern "C" fn(*mut c_void),
        context: *mut c_void,
    ) -> c_int;
}

/// The same as `ovfleet_thread_group` in `shim/shim.h`.
#[repr(C)]
struct RawThreadGroup {
    processors: *const u32,
    processor_count: usize,
    node: i32,
}

/// Numbers of threads and of their groups. Tests compare the results for each entry with those of a single thread. On
/// machines with fewer than 16 processors, several threads share a processor. In the entry with three groups, the
/// groups differ in their numbers of threads.
const THREADS: [Threads; 9] = [
    Threads { count: 2, groups: 1 },
    Threads { count: 3, groups: 1 },
    Threads { count: 4, groups: 1 },
    Threads { count: 8, groups: 1 },
    Threads { count: 16, groups: 1 },
    Threads { count: 2, groups: 2 },
    Threads { count: 4, groups: 2 },
    Threads { count: 5, groups: 3 },
    Threads { count: 16, groups: 2 },
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Threads {
    count: usize,
    groups: usize,
}

impl Threads {
    const ONE: Self = Self { count: 1, groups: 1 };
}

/// Calls `body` in an arena of threads, all of which are running. No thread is bound to processors.
fn on_threads<T>(threads: Threads, body: impl FnMut() -> T) -> T {
    on_processors(threads.count, &vec![&[][..]; threads.groups], body)
}

/// Calls `body` in an arena of `count` threads, all of which are running. `groups` are the processors to which each
/// group of threads is bound; a group without processors is not bound.
fn on_processors<T>(count: usize, groups: &[&[u32]], body: impl FnMut() -> T) -> T {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    struct Context<T, F> {
        body: F,
        result: Option<T>,
    }
    extern "C" fn call<T, F: FnMut() -> T>(context: *mut c_void) {
        // SAFETY: the context is that of the call below, which has the same types and waits until this function
        // returns.
        let context = unsafe { &mut *context.cast::<Context<T, F>>() };
        context.result = Some((context.body)());
    }
    fn callback<T, F: FnMut() -> T>(_: &Context<T, F>) -> extern "C" fn(*mut c_void) {
        call::<T, F>
    }
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let mut context = Context { body, result: None };
    let function = callback(&context);
    let raw = |processors: &&[u32]| RawThreadGroup {
        processors: processors.as_ptr(),
        processor_count: processors.len(),
        node: -1,
    };
    let groups: Vec<RawThreadGroup> = groups.iter().map(raw).collect();
    // SAFETY: the processors of the groups and the context live until the last call returns, and the context has the
    // type that the function expects.
    let was_run = unsafe {
        ovfleet_set_thread_groups(groups.as_ptr(), groups.len());
        let was_run = ovfleet_test_on_threads(count, function, (&raw mut context).cast());
        ovfleet_set_thread_groups(groups.as_ptr(), 0);
        was_run
    };
    assert_eq!(was_run, 1, "{count} threads in {} groups could not be started", groups.len());
    context.result.expect("invariant: the body was called")
}

/// A floating-point type of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FloatType {
    F32,
    Bf16,
}

impl FloatType {
    fn of(is_bf16: bool) -> Self {
        if is_bf16 { Self::Bf16 } else { Self::F32 }
    }

    fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// The bytes of numbers in memory. The bytes of a bf16 number are the upper half of the bytes of the same number in
    /// f32.
    fn encode(self, numbers: &[f32]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(numbers.len() * self.bytes());
        for number in numbers {
            bytes.extend_from_slice(&number.to_le_bytes()[4 - self.bytes()..]);
        }
        bytes
    }

    /// The numbers that bytes represent.
    fn decode(self, bytes: &[u8]) -> Vec<f32> {
        let float = |bytes: &[u8]| {
            let mut whole = [0; 4];
            whole[4 - bytes.len()..].copy_from_slice(bytes);
            f32::from_le_bytes(whole)
        };
        bytes.chunks_exact(self.bytes()).map(float).collect()
    }
}

/// A tested variant of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KernelVariant {
    Kernels(Isa),
    /// The AMX kernels on the C++ model of the tile registers, with the vector instructions of an instruction set.
    TileModel(Isa),
}

impl KernelVariant {
    const TILE_MODELS: [Self; 2] = [Self::TileModel(Isa::Portable), Self::TileModel(Isa::Avx512)];

    fn all() -> impl Iterator<Item = Self> {
        Isa::ALL.into_iter().map(Self::Kernels).chain(Self::TILE_MODELS)
    }

    fn isa(self) -> Isa {
        let (Self::Kernels(isa) | Self::TileModel(isa)) = self;
        isa
    }

    fn is_tile_model(self) -> bool {
        matches!(self, Self::TileModel(_))
    }

    /// Asserts that the shim has kernels for an instruction set if and only if the planner may choose them on this
    /// processor, and for the tile model if and only if the processor has the instruction set of its vectors.
    fn assert_agrees_with_plan(self, isas: &[Isa], was_run: bool) {
        let may_run = self.is_tile_model() || isas.contains(&self.isa());
        assert_eq!(was_run, may_run && CpuFeatures::detect().has(self.isa()), "{self:?}");
    }
}

/// Whether tests can run on real AMX tiles. If they cannot, prints that they are skipped.
fn has_real_tiles() -> bool {
    let support = tile_support();
    if support != TileSupport::Granted {
        // libtest hides what `println` prints in a test that passes.
        let _ = writeln!(std::io::stderr(), "SKIPPED: tests on real AMX tiles, which are {support:?}");
    }
    support == TileSupport::Granted
}

/// The number of an element type in `shim/shim.h`.
fn element(precision: Precision) -> c_int {
    precision as c_int
}
