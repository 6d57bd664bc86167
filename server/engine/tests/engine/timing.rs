//! Tests how long steps take and how long requests wait, in simulated time.

use std::time::Duration;

use server_engine::sim::{SimCosts, expected_tokens};
use server_engine::{Event, StepReport};

use crate::support::{Setup, VOCABULARY, prompt, request, settled, tokens};

const COSTS: SimCosts = SimCosts {
    step: Duration::from_micros(5000),
    prefill_token: Duration::from_micros(250),
    decode_token: Duration::from_micros(400),
};

#[tokio::test]
async fn a_long_prompt_delays_decoding_streams_by_no_more_than_a_chunk() {
    let chunk = 256;
    let mut setup = Setup::new(1000);
    setup.sim.costs = COSTS;
    setup.engine.scheduler.max_num_batched_tokens = 2 * chunk;
    setup.engine.scheduler.max_chunk_tokens = chunk;
    let (engine, gate) = setup.start_gated();
    let handle = engine.handle();
    let streams: Vec<_> =
        (0..8).map(|which| handle.submit(request(&prompt(which, 8), 100)).unwrap()).collect();
    let mut batch = gate.arrive();
    while batch.sequences.len() < 8 || batch.tokens.len() != 8 {
        gate.pass();
        batch = gate.arrive();
    }
    let long = handle.submit(request(&prompt(99, 4096), 3)).unwrap();
    let before: Vec<StepReport> = gate.reports.try_iter().collect();
    gate.pass();
    let reports = gate.release();
    for (which, stream) in (0..).zip(streams) {
        assert_eq!(tokens(stream).await, expected_tokens(&prompt(which, 8), 100, VOCABULARY));
    }
    assert_eq!(tokens(long).await, expected_tokens(&prompt(99, 4096), 3, VOCABULARY));
    settled(&handle).await;
    engine.shutdown().unwrap();

    let reports: Vec<StepReport> = before.into_iter().chain(reports).collect();
    let chunks: Vec<_> = reports.iter().filter(|report| report.prefill_tokens > 100).collect();
    // Attention costs nothing in this simulation, but the first chunks may be smaller than the later ones, because the
    // step-time model has not measured the cost of attention yet.
    let least = 4096_u32.div_ceil(chunk - 8);
    assert!(
        (least..least + 2).contains(&(chunks.len() as u32)),
        "each chunk fills its step: {} chunks",
        chunks.len()
    );
    let longest = COSTS.step + COSTS.prefill_token * chunk + COSTS.decode_token * 8;
    for report in chunks {
        assert!(report.generated_tokens >= 8, "all eight sequences continue: {report:?}");
        assert!(report.step_time <= longest, "{report:?}");
        assert_eq!(report.run_time, report.step_time, "nothing else takes simulated time");
    }
}

#[tokio::test]
async fn a_long_prompt_delays_decoding_streams_by_no_more_than_max_itl() {
    let max_itl = Duration::from_millis(20);
    let mut setup = Setup::new(1000);
    setup.sim.costs = COSTS;
    setup.engine.scheduler.max_num_batched_tokens = 512;
    setup.engine.scheduler.max_chunk_tokens = 128;
    setup.engine.scheduler.max_itl = Some(max_itl);
    let (engine, gate) = setup.start_gated();
    let handle = engine.handle();
    let streams: Vec<_> =
        (0..8).map(|which| handle.submit(request(&prompt(which, 8), 200)).unwrap()).collect();
    let mut batch = gate.arrive();
    while batch.sequences.len() < 8 || batch.tokens.len() != 8 {
        gate.pass();
        batch = gate.arrive();
    }
    let long = handle.submit(request(&prompt(99, 6000), 3)).unwrap();
    gate.pass();
    let reports = gate.release();
    for (which, stream) in (0..).zip(streams) {
        assert_eq!(tokens(stream).await, expected_tokens(&prompt(which, 8), 200, VOCABULARY));
    }
    assert_eq!(tokens(long).await, expected_tokens(&prompt(99, 6000), 3, VOCABULARY));
    settled(&handle).await;
    engine.shutdown().unwrap();

    let chunks: Vec<_> =
        reports.into_iter().filter(|report| report.prefill_tokens > 0 && report.num_sequences > 8).collect();
    // The first steps have small chunks, because the costs have not been measured yet.
    let (first, others) = chunks.split_at(24);
    assert!(first.iter().all(|report| report.step_time < max_itl.mul_f32(1.05)), "{first:?}");
    let (last, others) = others.split_last().unwrap();
    assert!(last.step_time < max_itl.mul_f32(1.05), "{last:?}");
    for report in others {
        assert!(report.step_time < max_itl.mul_f32(1.05), "{report:?}");
        assert!(report.step_time > max_itl.mul_f32(0.7), "{report:?}");
    }
}

#[tokio::test]
async fn requests_start_in_order_and_every_running_sequence_gets_a_token_each_step() {
    let mut setup = Setup::new(1000);
    setup.sim.costs = COSTS;
    setup.engine.scheduler.max_num_seqs = 4;
    let clock = setup.engine.clock.clone();
    let (engine, gate) = setup.start_gated();
    let handle = engine.handle();
    // One step is blocked until all requests have arrived.
    let first = handle.submit(request(&[1], 1)).unwrap();
    gate.arrive();
    let mut streams: Vec<_> =
        (0..24).map(|which| handle.submit(request(&prompt(which, 8), 10)).unwrap()).collect();
    gate.pass();
    gate.reports.recv().unwrap();
    assert_eq!(tokens(first).await.len(), 1);
    let began = clock.now();
    let mut starts = Vec::new();
    let mut generated = Vec::new();
    // 24 requests of 10 tokens run in groups of four, whose sequences advance together.
    for _ in 0..60 {
        gate.arrive();
        gate.pass();
        generated.push(gate.reports.recv().unwrap().generated_tokens);
        for (which, stream) in streams.iter_mut().enumerate() {
            while let Some(event) = stream.try_next() {
                if matches!(event, Event::Started { .. }) {
                    starts.push(which);
                }
            }
        }
    }
    assert_eq!(starts, (0..24).collect::<Vec<_>>());
    assert_eq!(generated, [4; 60]);
    settled(&handle).await;
    let per_group = COSTS.step * 10 + COSTS.prefill_token * 32 + COSTS.decode_token * 36;
    assert_eq!(clock.now() - began, per_group * 6, "the clock shows only the costs of all steps");
}

#[tokio::test]
async fn reports_and_rates_use_the_clock_of_the_engine() {
    let mut setup = Setup::new(1000);
    setup.sim.costs = COSTS;
    setup.engine.scheduler.max_num_seqs = 1;
    let (engine, gate) = setup.start_gated();
    let handle = engine.handle();
    let first = handle.submit(request(&prompt(1, 8), 3)).unwrap();
    gate.arrive();
    let second = handle.submit(request(&prompt(2, 8), 1)).unwrap();
    gate.pass();
    let reports = gate.release();
    assert_eq!(tokens(first).await.len(), 3);
    assert_eq!(tokens(second).await.len(), 1);
    settled(&handle).await;
    let load = *handle.load().borrow();
    engine.shutdown().unwrap();

    let reports: Vec<StepReport> = reports.into_iter().collect();
    let waits: Vec<_> = reports.iter().flat_map(|report| report.queue_times.clone()).collect();
    let prefill = COSTS.step + COSTS.prefill_token * 8;
    let decode = COSTS.step + COSTS.decode_token;
    assert_eq!(waits, [Duration::ZERO, prefill + decode * 2]);
    let times: Vec<_> = reports.iter().map(|report| report.step_time).collect();
    assert_eq!(times, [prefill, decode, decode, prefill]);
    assert_eq!(load.prefill_tokens_per_second, (8.0 / prefill.as_secs_f64()) as f32);
    let (slow, fast) = (1.0 / prefill.as_secs_f32(), 1.0 / decode.as_secs_f32());
    let rate = load.decode_tokens_per_second;
    assert!(slow < rate && rate < fast, "{rate} is not between {slow} and {fast}");
}
