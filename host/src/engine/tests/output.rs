use super::fake::{EOS, FISH, text_of};
use super::*;

/// A rig whose model, after the prompt `[0]`, always says these tokens.
fn saying(tokens: &[u32]) -> Rig {
    let mut all = vec![0];
    all.extend(tokens);
    let chain = all.windows(2).map(|w| (w[0], w[1])).collect();
    Setup { chain, ..Setup::default() }.start()
}

fn say(rig: &Rig, params: SamplingParams, stream: bool) -> (Vec<String>, Completion) {
    let request = Request { stream, ..Request::new("say", vec![0], params) };
    let mut events = rig.submit(request);
    let mut parts = stream::Parts::default();
    let mut texts = Vec::new();
    while let Some(event) = events.blocking_next() {
        if let Event::Delta { text, .. } = &event {
            texts.push(text.clone());
        }
        parts.add(event);
    }
    (texts, parts.completions.remove(0))
}

fn letters(text: &str) -> Vec<u32> {
    text.bytes().map(|b| u32::from(b - b'a')).collect()
}

#[test]
fn a_stop_string_across_tokens_is_cut_out_of_the_text() {
    let rig = saying(&letters("hewpstlycd"));
    let params = SamplingParams { stop: vec!["pst".into()], ..greedy(20) };
    let (texts, completion) = say(&rig, params.clone(), true);
    assert_eq!(completion.text, "hew");
    assert_eq!(completion.reason, FinishReason::Stop(MatchedStop::Text("pst".into())));
    assert_eq!(completion.token_ids, letters("hewpst"));
    assert_eq!(texts, ["h", "e", "w", "", "", ""]);
    let (texts, whole) = say(&rig, params, false);
    assert_eq!(texts, ["hew"]);
    assert_eq!(whole.token_ids, completion.token_ids);
    let kept = SamplingParams { stop: vec!["pst".into()], no_stop_trim: true, ..greedy(20) };
    assert_eq!(say(&rig, kept, true).1.text, "hewpst");
    rig.assert_idle();
}

#[test]
fn what_was_held_back_comes_out_at_the_end() {
    let rig = saying(&letters("hewps"));
    let params = SamplingParams { stop: vec!["pst".into()], ..greedy(5) };
    let (texts, completion) = say(&rig, params, true);
    assert_eq!(completion.text, "hewps");
    assert_eq!(texts, ["h", "e", "w", "", "ps"]);
    assert_eq!(completion.reason, FinishReason::Length { length: 5 });
}

#[test]
fn a_character_of_three_tokens_is_never_cut() {
    let tokens = [7, FISH[0], FISH[1], FISH[2], 8];
    let rig = saying(&tokens);
    let (texts, completion) = say(&rig, greedy(5), true);
    assert_eq!(texts, ["h", "", "", "鱼", "i"]);
    assert_eq!(completion.text, text_of(&tokens));
    // Cut off by the length, its bytes are no character.
    let (texts, completion) = say(&rig, greedy(3), true);
    assert_eq!(texts, ["h", "", "\u{FFFD}"]);
    assert_eq!(completion.text, text_of(&tokens[..3]));
    let (_, whole) = say(&rig, greedy(3), false);
    assert_eq!(whole.text, completion.text);
}

#[test]
fn the_end_token_ends_and_is_counted_but_not_shown() {
    let rig = saying(&[7, 8, EOS]);
    let (_, completion) = say(&rig, greedy(20), true);
    assert_eq!(completion.text, "hi");
    assert_eq!(completion.token_ids, [7, 8, EOS]);
    assert_eq!(completion.usage.completion_tokens, 3);
    assert_eq!(completion.reason, FinishReason::Stop(MatchedStop::Token(EOS)));
    let shown = SamplingParams { no_stop_trim: true, skip_special_tokens: false, ..greedy(20) };
    assert_eq!(say(&rig, shown, true).1.text, "hi<eos>");
    let ignoring = SamplingParams { ignore_eos: true, ..greedy(6) };
    let (_, completion) = say(&rig, ignoring, true);
    assert_eq!(completion.token_ids.len(), 6);
    assert_eq!(completion.reason, FinishReason::Length { length: 6 });
}

#[test]
fn stop_tokens_of_the_request_stop_too() {
    let rig = saying(&letters("hewpst"));
    let params = SamplingParams { stop_token_ids: vec![22], ..greedy(20) };
    let (_, completion) = say(&rig, params, true);
    assert_eq!(completion.text, "he");
    assert_eq!(completion.reason, FinishReason::Stop(MatchedStop::Token(22)));
}

#[test]
fn nothing_stops_before_min_new_tokens() {
    let rig = saying(&[7, EOS]);
    let params = SamplingParams { min_new_tokens: 4, ..greedy(20) };
    let (_, completion) = say(&rig, params, true);
    assert!(completion.token_ids.len() >= 4);
    assert!(!completion.token_ids[..4].contains(&EOS));
    let rig = saying(&letters("hewpstgn"));
    let params = SamplingParams { min_new_tokens: 3, stop: vec!["ew".into()], ..greedy(5) };
    assert_eq!(say(&rig, params, true).1.text, "hewps");
}

#[test]
fn zero_new_tokens_only_process_the_prompt() {
    let rig = Setup::default().start();
    let completion = rig.run(request("a", prompt(1, 21), 0));
    assert_eq!(completion.reason, FinishReason::Length { length: 0 });
    assert_eq!((completion.text.as_str(), completion.token_ids.len()), ("", 0));
    assert_eq!(rig.run(request("b", prompt(1, 21), 1)).usage.cached_device, 20);
    rig.assert_idle();
}

#[test]
fn logprobs_of_output_and_prompt() {
    let rig = Setup::default().start();
    let tokens = prompt(1, 30);
    let with = |id: &str, start: usize| {
        let mut request = request(id, tokens.clone(), 6);
        request.logprobs = LogprobOptions { output: true, prompt_start: Some(start), top: 3, token_ids: vec![2] };
        request
    };
    let cold = rig.run(with("cold", 0));
    assert_eq!(cold.reason, FinishReason::Length { length: 6 });
    assert_eq!(cold.logprobs.len(), 6);
    assert_eq!(cold.prompt_logprobs.len(), 30);
    assert_eq!(cold.prompt_logprobs[0].logprob, None);
    let found: Vec<u32> = cold.prompt_logprobs.iter().map(|l| l.token_id).collect();
    assert_eq!(found, tokens);
    for (entry, token) in cold.logprobs.iter().zip(&cold.token_ids) {
        assert_eq!(entry.token_id, *token);
        assert_eq!((entry.top[0].0, Some(entry.top[0].1)), (*token, entry.logprob), "greedy");
        assert_eq!((entry.top.len(), entry.token_ids[0].0), (3, 2));
    }
    // The logits behind each entry are those of the position before it.
    let logits = rig.logits_of("cold");
    for (position, entry) in cold.prompt_logprobs.iter().enumerate().skip(1) {
        let row: Vec<f32> = logits[&(0, position - 1)].iter().map(|b| f32::from_bits(*b)).collect();
        let sum: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
        let expected = f64::from(row[entry.token_id as usize]) - sum.ln();
        assert!((f64::from(entry.logprob.unwrap()) - expected).abs() < 1e-4);
    }
    // Warm: only pages before the start come from the cache, and nothing else changes.
    let warm = rig.run(with("warm", 18));
    assert_eq!(warm.usage.cached_device, 16);
    assert_eq!(warm.prompt_logprobs, cold.prompt_logprobs[18..]);
    assert_eq!(warm.logprobs, cold.logprobs);
    let whole = rig.run(with("whole", 0));
    assert_eq!(whole.usage.cached_device, 0);
    assert_eq!(whole.prompt_logprobs, cold.prompt_logprobs);
    rig.assert_idle();
}

#[test]
fn every_sample_gets_the_prompt_logprobs() {
    let rig = Setup::default().start();
    let mut several = Request { n: 2, ..request("n", prompt(1, 10), 3) };
    several.logprobs.prompt_start = Some(0);
    let completions = rig.submit(several).blocking_collect();
    assert_eq!(completions[0].prompt_logprobs.len(), 10);
    assert_eq!(completions[0].prompt_logprobs, completions[1].prompt_logprobs);
    assert!(completions.iter().all(|c| c.reason == FinishReason::Length { length: 3 }));
    let mut scored = request("scored", prompt(2, 10), 0);
    scored.logprobs.prompt_start = Some(4);
    assert_eq!(rig.run(scored).prompt_logprobs.len(), 6);
    let mut single = request("single", vec![3], 1);
    single.logprobs.prompt_start = Some(0);
    assert_eq!(rig.run(single).prompt_logprobs.len(), 1);
    rig.assert_idle();
}
