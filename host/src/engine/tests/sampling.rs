use super::*;

fn seeded(seed: i64) -> SamplingParams {
    SamplingParams { seed: Some(seed), max_new_tokens: Some(24), ..SamplingParams::default() }
}

#[test]
fn a_seed_gives_the_same_tokens_whatever_the_batch() {
    let rig = Setup::default().start();
    let alone = rig.run(Request::new("alone", prompt(1, 20), seeded(9)));
    let crowd: Vec<RequestStream> =
        (0..6).map(|i| rig.submit(Request::new(format!("c{i}"), prompt(i + 2, 9), seeded(i.into())))).collect();
    let among = rig.run(Request::new("among", prompt(1, 20), seeded(9)));
    assert_eq!(alone.token_ids, among.token_ids);
    let other = rig.run(Request::new("other", prompt(1, 20), seeded(10)));
    assert_ne!(alone.token_ids, other.token_ids);
    for stream in crowd {
        stream.blocking_collect();
    }
    rig.assert_idle();
}

#[test]
fn without_a_seed_runs_differ() {
    let rig = Setup::default().start();
    let run = |id: &str| {
        let sampling = SamplingParams { seed: None, ..seeded(0) };
        rig.run(Request::new(id, prompt(1, 20), sampling)).token_ids
    };
    assert_ne!(run("a"), run("b"));
}

#[test]
fn penalties_count_generated_tokens_only() {
    // After 1 always comes 1, unless it is penalised; the prompt's own 1 does not count.
    let rig = Setup { chain: vec![(1, 1)], ..Setup::default() }.start();
    let plain = rig.run(Request::new("plain", vec![1], greedy(4)));
    assert_eq!(plain.token_ids, [1, 1, 1, 1]);
    let biased = SamplingParams { logit_bias: vec![(1, -99.0)], ..greedy(1) };
    assert_ne!(rig.run(Request::new("biased", vec![1], biased)).token_ids, [1]);
    let params = SamplingParams { logit_bias: vec![(1, -94.0), (2, 5.5)], frequency_penalty: 2.0, ..greedy(3) };
    // Logits: token 1 has 6 - 2 * count, token 2 at least 5.5.
    let penalised = rig.run(Request::new("penalised", vec![1], params));
    assert_eq!(penalised.token_ids[..2], [1, 2]);
    rig.assert_idle();
}
