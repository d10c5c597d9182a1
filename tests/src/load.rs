//! Many streaming clients whose answers are compared with cold ones, token by token.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Client, Usage, usage, usage_of_generate};
use crate::prompt::{self, Random};

/// A greedy request to one of the faces that stream.
#[derive(Debug, Clone)]
pub struct Question {
    path: &'static str,
    body: Value,
}

/// What two answers to a question must have in common.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// Each token with its log-probability, as the server wrote them.
    pub tokens: Vec<Value>,
    /// Why it ended.
    pub finish: String,
}

/// An answer, and how it came.
#[derive(Debug)]
pub struct Streamed {
    /// The answer.
    pub answer: Answer,
    /// Where the prompt came from.
    pub usage: Usage,
    /// Seconds between events with tokens.
    pub gaps: Vec<f64>,
}

/// Prompts of [`questions`].
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Groups of questions whose prompts begin alike.
    pub groups: usize,
    /// Questions in a group.
    pub group: usize,
    /// Tokens with which all prompts of a group begin.
    pub shared: usize,
    /// Tokens after them, at most; at least half of it.
    pub own: usize,
    /// Tokens of an answer.
    pub new_tokens: u32,
}

/// Questions to `/generate`, `/v1/completions` and `/v1/chat/completions` in turn.
pub fn questions(shape: &Shape) -> Vec<Question> {
    let mut random = Random::new(99);
    let mut found = Vec::new();
    for group in 0..shape.groups as u64 {
        let shared = prompt::ids(500 + group, shape.shared);
        let shared_text = words(500 + group, shape.shared / 2);
        for member in 0..shape.group as u64 {
            let seed = 1000 + group * 100 + member;
            let own = shape.own / 2 + random.below(1 + shape.own as u64 / 2) as usize;
            let ids: Vec<u32> = shared.iter().copied().chain(prompt::ids(seed, own)).collect();
            let (path, body) = match found.len() % 3 {
                0 => ("/generate", generate(&ids, shape.new_tokens)),
                1 => ("/v1/completions", openai(json!({"prompt": ids, "logprobs": 0}), shape.new_tokens)),
                _ => {
                    let messages = json!([
                        {"role": "system", "content": shared_text},
                        {"role": "user", "content": words(seed, own / 2)},
                    ]);
                    let body = json!({"messages": messages, "logprobs": true});
                    ("/v1/chat/completions", openai(body, shape.new_tokens))
                }
            };
            found.push(Question { path, body });
        }
    }
    found
}

fn generate(ids: &[u32], new_tokens: u32) -> Value {
    json!({
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": true},
        "return_logprob": true,
        "stream": true,
    })
}

fn openai(mut body: Value, new_tokens: u32) -> Value {
    body["max_tokens"] = new_tokens.into();
    body["temperature"] = 0.into();
    body["ignore_eos"] = true.into();
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    body
}

/// Words of the model's vocabulary, about two tokens each.
fn words(seed: u64, count: usize) -> String {
    const WORDS: [&str; 16] = [
        "harbour", "lantern", "granite", "orchard", "velvet", "thunder", "copper", "meadow", "cinder", "willow",
        "anchor", "pebble", "saffron", "glacier", "timber", "quartz",
    ];
    let mut random = Random::new(seed);
    let word = |number: u64| WORDS.get(number as usize).copied().unwrap_or_default();
    (0..count).map(|_| word(random.below(WORDS.len() as u64))).collect::<Vec<_>>().join(" ")
}

/// Asks, and reads the answer to its end.
///
/// # Errors
/// Says what was wrong with the answer.
pub fn ask(client: &Client, question: &Question, salt: Option<&str>) -> Result<Streamed, String> {
    let mut body = question.body.clone();
    if let Some(salt) = salt {
        body["cache_salt"] = salt.into();
    }
    let wrong = |what: String| format!("{}: {what}", question.path);
    let mut stream = client.try_stream(question.path, &body).map_err(|error| wrong(error.to_string()))?;
    let mut reader = Reader::default();
    if stream.status != 200 {
        let text = stream.next_event();
        return Err(wrong(format!("status {}, {text:?}", stream.status)));
    }
    let mut gaps = Vec::new();
    let mut last: Option<Instant> = None;
    while let Some(event) = stream.next_event().map_err(|error| wrong(format!("the stream broke: {error}")))? {
        if event.get("error").is_some() {
            return Err(wrong(event.to_string()));
        }
        if reader.take(question.path, &event) {
            let now = Instant::now();
            gaps.extend(last.map(|last| (now - last).as_secs_f64()));
            last = Some(now);
        }
    }
    let Some(usage) = reader.usage else {
        return Err(wrong("the stream ended without usage".into()));
    };
    Ok(Streamed { answer: Answer { text: reader.text, tokens: reader.tokens, finish: reader.finish }, usage, gaps })
}

#[derive(Default)]
struct Reader {
    text: String,
    tokens: Vec<Value>,
    finish: String,
    usage: Option<Usage>,
}

impl Reader {
    /// Takes an event in; whether it brought tokens.
    fn take(&mut self, path: &str, event: &Value) -> bool {
        let before = self.tokens.len();
        if path == "/generate" {
            let meta = &event["meta_info"];
            self.text = event["text"].as_str().unwrap_or_default().to_owned();
            self.tokens = meta["output_token_logprobs"].as_array().cloned().unwrap_or_default();
            if let Some(kind) = meta["finish_reason"]["type"].as_str() {
                self.finish = kind.to_owned();
                self.usage = Some(usage_of_generate(event));
            }
        } else {
            if event["usage"].is_object() {
                self.usage = Some(usage(&event["usage"]));
            }
            let choice = &event["choices"][0];
            let text = choice["text"].as_str().or(choice["delta"]["content"].as_str());
            self.text.push_str(text.unwrap_or_default());
            let logprobs = &choice["logprobs"];
            if let Some(tokens) = logprobs["content"].as_array() {
                self.tokens.extend(tokens.iter().map(|token| json!([token["logprob"], token["bytes"]])));
            }
            if let (Some(tokens), Some(numbers)) =
                (logprobs["tokens"].as_array(), logprobs["token_logprobs"].as_array())
            {
                self.tokens.extend(numbers.iter().zip(tokens).map(|(number, token)| json!([number, token])));
            }
            if let Some(finish) = choice["finish_reason"].as_str() {
                self.finish = finish.to_owned();
            }
        }
        self.tokens.len() > before
    }
}

/// Questions with their cold answers.
#[derive(Debug)]
pub struct Load {
    pairs: Vec<(Question, Answer)>,
}

/// What clients met.
#[derive(Debug, Default)]
pub struct Report {
    /// Answers that were right.
    pub answers: u64,
    /// What went wrong. The first failure ends the load.
    pub failures: Vec<String>,
    /// Seconds between tokens, of all clients.
    pub gaps: Vec<f64>,
    /// Prompt tokens by where they came from.
    pub usage: Usage,
}

impl Report {
    /// The gap that `part` of all gaps do not exceed, in seconds; 0 without gaps.
    pub fn gap(&self, part: f64) -> f64 {
        let mut gaps = self.gaps.clone();
        gaps.sort_by(f64::total_cmp);
        let at = ((gaps.len() as f64 * part).ceil() as usize).clamp(1, gaps.len().max(1));
        gaps.get(at - 1).copied().unwrap_or(0.0)
    }

    fn add(&mut self, streamed: Streamed) {
        self.answers += 1;
        self.gaps.extend(streamed.gaps);
        self.usage.prompt += streamed.usage.prompt;
        self.usage.device += streamed.usage.device;
        self.usage.host += streamed.usage.host;
        self.usage.storage += streamed.usage.storage;
    }
}

impl Load {
    /// Asks each question once, with nothing cached: no other request has its salt.
    ///
    /// # Errors
    /// When a question is not answered in full.
    pub fn prepare(client: &Client, shape: &Shape) -> Result<Self, String> {
        const TOGETHER: usize = 16;
        let questions = questions(shape);
        let next = AtomicUsize::new(0);
        let asker = || {
            let mut pairs = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(question) = questions.get(number) else { return Ok(pairs) };
                let cold = ask(client, question, Some(&format!("cold {number}")))?;
                let length = cold.answer.tokens.len();
                if cold.usage.cached() != 0 || length != shape.new_tokens as usize {
                    return Err(format!("no cold answer: {length} tokens, {:?}", cold.usage));
                }
                pairs.push((question.clone(), cold.answer));
            }
        };
        let found: Vec<Result<Vec<_>, String>> = std::thread::scope(|scope| {
            let askers: Vec<_> = (0..TOGETHER).map(|_| scope.spawn(asker)).collect();
            askers.into_iter().map(|asker| asker.join().expect("nobody panics while asking")).collect()
        });
        let pairs = found.into_iter().collect::<Result<Vec<_>, _>>()?.concat();
        Ok(Self { pairs })
    }

    /// Asks each question once more, so that what its prompt has in common with the others is cached and stored.
    ///
    /// # Errors
    /// When an answer is not the cold one.
    pub fn warm(&self, client: &Client) -> Result<(), String> {
        self.pairs.iter().try_for_each(|(question, cold)| {
            let warm = ask(client, question, None)?;
            if warm.answer == *cold { Ok(()) } else { Err(altered(question, cold, &warm)) }
        })
    }

    /// `clients` clients ask questions one after the other, until `during` returns; answers under way are read to their end.
    pub fn run<R>(&self, address: &str, clients: u64, during: impl FnOnce() -> R) -> (Report, R) {
        let over = AtomicBool::new(false);
        let report = Mutex::new(Report::default());
        let result = std::thread::scope(|scope| {
            for number in 0..clients {
                let (over, report) = (&over, &report);
                scope.spawn(move || self.client(address, number, over, report));
            }
            // Also when `during` panics the clients must end.
            let _over = SetOnDrop(&over);
            during()
        });
        (report.into_inner().expect("no client panics with the report"), result)
    }

    fn client(&self, address: &str, number: u64, over: &AtomicBool, report: &Mutex<Report>) {
        let client = Client::new(address);
        let mut random = Random::new(number + 1);
        while !over.load(Ordering::Relaxed) {
            let Some((question, cold)) = self.pairs.get(random.below(self.pairs.len() as u64) as usize) else { return };
            let asked = ask(&client, question, None);
            let mut report = report.lock().expect("no client panics with the report");
            match asked {
                Ok(streamed) if streamed.answer == *cold => report.add(streamed),
                Ok(streamed) => report.failures.push(altered(question, cold, &streamed)),
                Err(error) => report.failures.push(error),
            }
            if !report.failures.is_empty() {
                return over.store(true, Ordering::Relaxed);
            }
        }
    }
}

fn altered(question: &Question, cold: &Answer, now: &Streamed) -> String {
    format!("an altered answer to {question:?}\ncold {cold:?}\nnow  {now:?}")
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// All requests are over: nothing runs, nothing waits, no page is on its way, late or locked, and every page of device and host is
/// free after a flush.
pub fn assert_nothing_is_held(client: &Client) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let busy = [
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "kvdock:prefetches_running",
        "kvdock:backup_pending_pages",
        "kvdock:quarantined_pages",
        "sglang:num_used_tokens",
    ];
    loop {
        let metrics = client.metrics();
        let held: Vec<_> = busy.iter().map(|name| (name, metrics.sum(name, &[]))).filter(|(_, n)| *n != 0.0).collect();
        if held.is_empty() {
            break;
        }
        assert!(Instant::now() < deadline, "all clients are gone, and yet: {held:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    client.flush();
    let metrics = client.metrics();
    let sum = |name: &str| metrics.sum(name, &[]);
    assert_eq!(sum("sglang:kv_available_tokens"), sum("sglang:max_total_num_tokens"), "device pages are free");
    assert_eq!(sum("sglang:hicache_host_used_tokens"), 0.0, "host pages are free");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_one_of_the_gaps() {
        let report = Report { gaps: (1..=200).map(f64::from).collect(), ..Report::default() };
        assert_eq!(report.gap(0.99), 198.0);
        assert_eq!(report.gap(1.0), 200.0);
        assert_eq!(Report::default().gap(0.99), 0.0);
    }

    #[test]
    fn prompts_of_a_group_begin_alike_and_end_apart() {
        let shape = Shape { groups: 2, group: 3, shared: 32, own: 40, new_tokens: 4 };
        let questions = questions(&shape);
        let ids = |at: usize| questions[at].body["input_ids"].as_array().or(questions[at].body["prompt"].as_array());
        let (first, second, other) = (ids(0).unwrap(), ids(1).unwrap(), ids(3).unwrap());
        assert_eq!((&first[..32], first[32] == second[32]), (&second[..32], false));
        assert_ne!(first[0], other[0]);
        assert!((52..=72).contains(&first.len()), "{}", first.len());
    }
}
