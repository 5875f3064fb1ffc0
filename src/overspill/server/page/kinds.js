// Two kinds of models: those that continue a conversation, and those with an encoder, which answer each message by itself.

export const kindOf = card => ({ single: card.encoder_decoder === true, languages: card.languages ?? [] });

// The path and the fields of the request for an answer to the last message.
export function requestOf(single, messages, system, languages) {
  if (single) {
    const chosen = Object.entries(languages).filter(([, name]) => name);
    return { path: "v1/completions", fields: { prompt: messages.at(-1).content, ...Object.fromEntries(chosen) } };
  }
  const first = system ? [{ role: "system", content: system }] : [];
  return {
    path: "v1/chat/completions",
    fields: { messages: [...first, ...messages.map(({ role, content }) => ({ role, content }))] },
  };
}

// New text in an event of either kind.
export const textOf = choice => choice?.delta?.content ?? choice?.text ?? "";

// Tokens of a conversation, which have to fit into the context together; 0 if nothing is continued.
export const totalOf = (single, usage) => single ? 0 : (usage?.prompt_tokens ?? 0) + (usage?.completion_tokens ?? 0);
