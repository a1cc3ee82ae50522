// Requests to the service. Server-sent events use fetch, as EventSource cannot send a token.

const SILENT_MS = 15_000; // The service sends a comment every 5 seconds.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(more) {
  const token = sessionStorage.getItem("token");
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

async function answer(path, more, signal) {
  // A browser would follow a redirect to another process without the token.
  const response = await fetch(path, { headers: headers(more), cache: "no-store", redirect: "manual", signal });
  if (response.type === "opaqueredirect") throw new Refused(307, "another process serves this, and this page is not connected to it yet");
  if (!response.ok) {
    const error = await response.json().catch(() => ({}));
    throw new Refused(response.status, error.message ?? `the service answered ${response.status}`);
  }
  return response;
}

export async function getJson(path) {
  return (await answer(path, {}, AbortSignal.timeout(SILENT_MS))).json();
}

// Joins the lists of several processes. A process that does not have the name answers 404.
export async function getLists(addresses, path) {
  const answers = await Promise.allSettled(addresses.map((at) => getJson(at + path)));
  const lists = answers.filter((each) => each.status === "fulfilled");
  if (!lists.length) throw (answers.find((each) => each.reason.status !== 404) ?? answers[0]).reason;
  return lists.flatMap((each) => each.value);
}

// Calls `heard` with each event's data until the connection ends or `signal` aborts it, then throws.
export async function follow(path, heard, signal) {
  const abort = new AbortController();
  const stop = () => abort.abort();
  signal.addEventListener("abort", stop);
  let timer = setTimeout(stop, SILENT_MS);
  try {
    const response = await answer(path, { Accept: "text/event-stream" }, abort.signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let partial = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the service ended the connection");
      clearTimeout(timer);
      timer = setTimeout(stop, SILENT_MS);
      const events = (partial + value).split("\n\n");
      partial = events.pop();
      for (const event of events) {
        const data = event.split("\n").find((line) => line.startsWith("data: "));
        if (data) heard(JSON.parse(data.slice(6)));
      }
    }
  } finally {
    clearTimeout(timer);
    signal.removeEventListener("abort", stop);
    stop();
  }
}
