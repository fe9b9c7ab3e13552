"""A reward of the begun run; its bytes stand in the fingerprint of its scores."""


def tagged(completion, answer):
    return {"score": float(f"<answer>{answer}</answer>" in completion), "length": float(len(completion))}
